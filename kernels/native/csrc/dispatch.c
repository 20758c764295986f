// Which kernels this CPU runs.
#include "kernels.h"

#include <string.h>

static int runs_avx512(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
#else
    return 0;
#endif
}

static int runs_avx2(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return 0;
#endif
}

const Kernels *kernels_called(const char *isa)
{
    const Kernels *fastest_first[] = {
#if defined(__x86_64__)
        runs_avx512() ? &kernels_avx512 : NULL,
        runs_avx2() ? &kernels_avx2 : NULL,
#endif
        &kernels_portable,
    };
    for (size_t i = 0; i < sizeof fastest_first / sizeof *fastest_first; i++) {
        const Kernels *kernels = fastest_first[i];
        if (kernels != NULL && (isa == NULL || strcmp(isa, kernels->name) == 0))
            return kernels;
    }
    return NULL;
}

// See threads.h. A call is one word that everybody reads: its number, its tasks, and the next one
// to be taken. Who raises the last has the task, so whoever is awake does what there is to do and
// nobody waits for a thread that the system has taken off its core, but for the task it is in.
#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#define AWAKE_NS 100000 // how long a thread looks for the next call before it sleeps
#define LOOKS 64        // between two looks at the clock, or at who else wants the core

struct Threads {
    _Alignas(64) _Atomic uint64_t word; // number of the call (32) | tasks (16) | next task (16)
    _Alignas(64) _Atomic uint32_t ended;
    Task *task;
    void *context;
    _Alignas(64) _Atomic int sleepers;
    _Atomic int closing;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    int count, started;
    struct Worker {
        Threads *threads;
        int thread;
        pthread_t handle;
    } workers[];
};

static int tasks_of(uint64_t word) { return word >> 16 & 0xffff; }
static int next_of(uint64_t word) { return word & 0xffff; }

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void work(Threads *t, int thread)
{
    uint64_t word = atomic_load(&t->word);
    while (next_of(word) < tasks_of(word)) {
        // Taken means that this call has not ended, so its task and context are still there.
        if (!atomic_compare_exchange_weak(&t->word, &word, word + 1))
            continue;
        t->task(t->context, next_of(word), thread);
        atomic_fetch_add(&t->ended, 1);
        word = atomic_load(&t->word);
    }
}

static int has_work(Threads *t)
{
    uint64_t word = atomic_load(&t->word);
    return next_of(word) < tasks_of(word) || atomic_load(&t->closing);
}

static void wait_for_work(Threads *t)
{
    int64_t until = now_ns() + AWAKE_NS;
    do {
        for (int look = 0; look < LOOKS; look++) {
            if (has_work(t))
                return;
            relax();
        }
    } while (now_ns() < until);
    pthread_mutex_lock(&t->mutex);
    atomic_fetch_add(&t->sleepers, 1);
    while (!has_work(t)) // a caller writes the word first and then looks for sleepers
        pthread_cond_wait(&t->wake, &t->mutex);
    atomic_fetch_sub(&t->sleepers, 1);
    pthread_mutex_unlock(&t->mutex);
}

static void *worker_main(void *own)
{
    struct Worker *worker = own;
    while (!atomic_load(&worker->threads->closing)) {
        work(worker->threads, worker->thread);
        wait_for_work(worker->threads);
    }
    return NULL;
}

static void wake_sleepers(Threads *t)
{
    if (atomic_load(&t->sleepers) == 0)
        return;
    pthread_mutex_lock(&t->mutex);
    pthread_cond_broadcast(&t->wake);
    pthread_mutex_unlock(&t->mutex);
}

Threads *threads_open(int count)
{
    size_t size = sizeof(Threads) + count * sizeof(struct Worker);
    Threads *t = aligned_alloc(64, (size + 63) / 64 * 64);
    if (t == NULL)
        return NULL;
    *t = (Threads){.count = count};
    pthread_mutex_init(&t->mutex, NULL);
    pthread_cond_init(&t->wake, NULL);
    for (int i = 0; i < count - 1; i++) {
        t->workers[i] = (struct Worker){.threads = t, .thread = i + 1};
        if (pthread_create(&t->workers[i].handle, NULL, worker_main, &t->workers[i]) != 0) {
            threads_close(t);
            return NULL;
        }
        t->started++;
    }
    return t;
}

void threads_close(Threads *t)
{
    if (t == NULL)
        return;
    atomic_store(&t->closing, 1);
    wake_sleepers(t);
    for (int i = 0; i < t->started; i++)
        pthread_join(t->workers[i].handle, NULL);
    pthread_mutex_destroy(&t->mutex);
    pthread_cond_destroy(&t->wake);
    free(t);
}

int threads_count(const Threads *t)
{
    return t->count;
}

void threads_run(Threads *t, Task *task, void *context, int tasks)
{
    if (t->count == 1 || tasks <= 1) {
        for (int i = 0; i < tasks; i++)
            task(context, i, 0);
        return;
    }
    t->task = task;
    t->context = context;
    atomic_store(&t->ended, 0);
    uint64_t call = (atomic_load(&t->word) >> 32) + 1;
    atomic_store(&t->word, call << 32 | (uint64_t)tasks << 16);
    wake_sleepers(t);
    work(t, 0);
    for (int look = 1; atomic_load(&t->ended) != (uint32_t)tasks; look++) {
        if (look % (LOOKS * LOOKS) == 0)
            sched_yield(); // somebody's task waits for a core, perhaps this one
        relax();
    }
}

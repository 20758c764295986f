// See threads.h. A call is one word that everybody reads: its number, its tasks, and the next one
// to be taken. Who raises the last has the task, so whoever is awake does what there is to do and
// nobody waits for a thread that the system has taken off its core, but for the task it is in.
#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#define AWAKE_NS 100000 // how long a thread looks for the next call before it sleeps
#define LOOKS 64        // between two looks at the clock, or at who else wants the core

typedef struct {
    Threads *threads;
    int thread;
    pthread_t handle;
    pthread_cond_t wake;
    _Atomic int asleep;
} Worker;

struct Threads {
    _Alignas(64) _Atomic uint64_t word; // number of the call (32) | tasks (16) | next task (16)
    _Alignas(64) _Atomic uint32_t ended;
    Task *task;
    void *context;
    _Alignas(64) _Atomic int active; // threads that take tasks now
    _Atomic int closing;
    Place place;
    pthread_mutex_t mutex;
    int started;
    Worker workers[]; // one for each thread; the first is the caller's, and unused
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

static int has_work(Threads *t, int thread)
{
    uint64_t word = atomic_load(&t->word);
    return (next_of(word) < tasks_of(word) && thread < atomic_load(&t->active)) || atomic_load(&t->closing);
}

static void work(Threads *t, int thread)
{
    uint64_t word = atomic_load(&t->word);
    while (next_of(word) < tasks_of(word) && thread < atomic_load(&t->active)) {
        // Taken means that this call has not ended, so its task and context are still there.
        if (!atomic_compare_exchange_weak(&t->word, &word, word + 1))
            continue;
        t->task(t->context, next_of(word), thread);
        atomic_fetch_add(&t->ended, 1);
        word = atomic_load(&t->word);
    }
}

static void wait_for_work(Worker *worker)
{
    Threads *t = worker->threads;
    int64_t until = now_ns() + AWAKE_NS;
    do {
        for (int look = 0; look < LOOKS; look++) {
            if (has_work(t, worker->thread))
                return;
            relax();
        }
    } while (now_ns() < until);
    pthread_mutex_lock(&t->mutex);
    atomic_store(&worker->asleep, 1);
    while (!has_work(t, worker->thread)) // a caller writes the word first and then looks who sleeps
        pthread_cond_wait(&worker->wake, &t->mutex);
    atomic_store(&worker->asleep, 0);
    pthread_mutex_unlock(&t->mutex);
}

static void pin(pthread_t handle, const Place *place, int thread)
{
#if defined(__linux__)
    if (place->cores == NULL)
        return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(place->cores[thread], &set);
    pthread_setaffinity_np(handle, sizeof set, &set); // where it is not allowed, it runs anywhere
#else
    (void)handle, (void)place, (void)thread;
#endif
}

static void *worker_main(void *own)
{
    Worker *worker = own;
    pin(worker->handle, &worker->threads->place, worker->thread);
    while (!atomic_load(&worker->threads->closing)) {
        work(worker->threads, worker->thread);
        wait_for_work(worker);
    }
    return NULL;
}

static void wake(Threads *t, int threads)
{
    for (int i = 1; i < threads; i++) {
        if (!atomic_load(&t->workers[i].asleep))
            continue;
        pthread_mutex_lock(&t->mutex);
        pthread_cond_signal(&t->workers[i].wake);
        pthread_mutex_unlock(&t->mutex);
    }
}

Threads *threads_open(const Place *place)
{
    size_t size = sizeof(Threads) + place->threads * sizeof(Worker);
    Threads *t = aligned_alloc(64, (size + 63) / 64 * 64);
    if (t == NULL)
        return NULL;
    *t = (Threads){.place = *place};
    pthread_mutex_init(&t->mutex, NULL);
    for (int i = 1; i < place->threads; i++) {
        Worker *worker = &t->workers[i];
        *worker = (Worker){.threads = t, .thread = i};
        pthread_cond_init(&worker->wake, NULL);
        if (pthread_create(&worker->handle, NULL, worker_main, worker) != 0) {
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
    wake(t, t->started + 1);
    for (int i = 1; i <= t->started; i++) {
        pthread_join(t->workers[i].handle, NULL);
        pthread_cond_destroy(&t->workers[i].wake);
    }
    pthread_mutex_destroy(&t->mutex);
    free(t);
}

int threads_count(const Threads *t)
{
    return t->place.threads;
}

// Whether somebody else computes, whose cores some of these threads are on.
static int others_compute(const Place *place)
{
    for (int i = 0; i < place->lines; i++)
        if (i != place->line && place->busy[i * BUSY_STRIDE] != 0)
            return 1;
    return 0;
}

void threads_run(Threads *t, Task *task, void *context, int tasks)
{
    const int all = t->place.threads, own = t->place.own;
    const int active = own < all && !others_compute(&t->place) ? all : own;
    if (active == 1 || tasks <= 1) {
        for (int i = 0; i < tasks; i++)
            task(context, i, 0);
        return;
    }
    t->task = task;
    t->context = context;
    atomic_store(&t->ended, 0);
    atomic_store(&t->active, active);
    uint64_t call = (atomic_load(&t->word) >> 32) + 1;
    atomic_store(&t->word, call << 32 | (uint64_t)tasks << 16);
    wake(t, active);
    work(t, 0);
    for (int look = 1; atomic_load(&t->ended) != (uint32_t)tasks; look++) {
        if (look % (LOOKS * LOOKS) == 0)
            sched_yield(); // somebody's task waits for a core, perhaps this one
        relax();
    }
}

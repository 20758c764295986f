// Threads that run the tasks of one call after another, the caller among them.
#ifndef KVFERRY_THREADS_H
#define KVFERRY_THREADS_H

#include "engine.h"

// The most tasks of one call.
#define MOST_TASKS 65535

typedef struct Threads Threads;
typedef void Task(void *context, int task, int thread);

// The threads of `place`, the caller's and as many more as it has. Null if there is no memory or
// the system gives none.
Threads *threads_open(const Place *place);
void threads_close(Threads *);
int threads_count(const Threads *);

// Runs `task(context, 0 .. tasks - 1, thread)` and returns when all have ended. `thread` is below
// `threads_count`, and no two tasks that run at the same time have the same.
void threads_run(Threads *, Task *task, void *context, int tasks);

#endif

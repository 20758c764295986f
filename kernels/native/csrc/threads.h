// Threads that run the tasks of one call after another, the caller among them.
#ifndef KVFERRY_THREADS_H
#define KVFERRY_THREADS_H

// The most tasks of one call.
#define MOST_TASKS 65535

typedef struct Threads Threads;
typedef void Task(void *context, int task, int thread);

// `count` threads in all: the caller's and `count - 1` of its own. Null if there is no memory or
// the system gives none.
Threads *threads_open(int count);
void threads_close(Threads *);
int threads_count(const Threads *);

// Runs `task(context, 0 .. tasks - 1, thread)` and returns when all have ended. `thread` is below
// `threads_count`, and no two tasks that run at the same time have the same.
void threads_run(Threads *, Task *task, void *context, int tasks);

#endif

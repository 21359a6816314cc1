/* A thread pool whose threads run the phases of a job together.
 *
 * Every thread runs the same function. A phase is a number of independent tasks. Each thread has a contiguous range of
 * them, and steals from the others when its own are taken. A phase ends when its tasks are done, not when all threads
 * have arrived, so a thread that is not scheduled delays the others only if it is in the middle of a task.
 */
#ifndef TINKEX_POOL_H
#define TINKEX_POOL_H

#include <stdatomic.h>

/* A counter that threads share, on its own cache line. */
typedef struct {
    _Alignas(64) atomic_long value;
} tinkex_counter;

/* The state of one thread in a job. */
typedef struct {
    tinkex_counter *counters; /* num_workers + 1 per phase: tasks taken from each range, and tasks done */
    int num_workers;
    int worker; /* the index of this thread in the job */
    int phase;
} tinkex_thread;

typedef void (*tinkex_job)(tinkex_thread *thread, void *context);
typedef void (*tinkex_task)(const void *context, long task, int worker);

/* Runs a job of at most num_phases phases on num_threads threads; returns TINKEX_OK or TINKEX_NO_MEMORY. */
int tinkex_run(tinkex_job job, void *context, int num_phases, int num_threads);

/* Runs a function on num_threads threads and waits for all of them; GOMP_parallel of libgomp is one. */
typedef void (*tinkex_team)(void (*run)(void *context), void *context, unsigned num_threads, unsigned flags);

/* The same on the threads of another runtime, which may be fewer. Threads that have just computed something still spin;
 * a pool of our own would compete with them for the processors. */
int tinkex_run_in_team(tinkex_team team, tinkex_job job, void *context, int num_phases, int num_threads);

/* Runs the next phase: when this returns, its tasks are done and their writes are visible. */
void tinkex_parallel_for(tinkex_thread *thread, long num_tasks, tinkex_task task, const void *context);

#define TINKEX_MAX_THREADS 64

#endif

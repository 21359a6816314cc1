/* Threads that walk through the phases of a job together.
 *
 * Every thread runs the same function. A phase is a number of independent tasks. Each thread has a range of them that
 * lie side by side, and helps the others when its own are taken. A phase is over when its tasks are done, not when
 * all threads have arrived, so a thread that the system has put aside holds nobody up unless it is in the middle of
 * a task.
 */
#ifndef TINKEX_POOL_H
#define TINKEX_POOL_H

#include <stdatomic.h>

/* A number that threads count up together, on a cache line of its own. */
typedef struct {
    _Alignas(64) atomic_long value;
} tinkex_counter;

/* One thread's way through a job. */
typedef struct {
    tinkex_counter *counters; /* num_workers + 1 for each phase: tasks taken of each range, and tasks done */
    int num_workers;
    int worker; /* workers of one job have different numbers */
    int phase;
} tinkex_walk;

typedef void (*tinkex_job)(tinkex_walk *walk, void *context);
typedef void (*tinkex_task)(const void *context, long task, int worker);

/* Runs a job of at most num_phases phases on num_threads threads; returns TINKEX_OK or TINKEX_NO_MEMORY. */
int tinkex_run(tinkex_job job, void *context, int num_phases, int num_threads);

/* Runs a function on so many threads at once and waits for all of them; GOMP_parallel of libgomp is one. */
typedef void (*tinkex_team)(void (*run)(void *context), void *context, unsigned num_threads, unsigned flags);

/* The same on somebody else's threads, which may be fewer. Where they have just computed something and still spin, ours
 * would have to take turns with them. */
int tinkex_run_in_team(tinkex_team team, tinkex_job job, void *context, int num_phases, int num_threads);

/* The next phase: its tasks are done when this returns, and their writes are seen. */
void tinkex_share(tinkex_walk *walk, long num_tasks, tinkex_task task, const void *context);

#define TINKEX_MAX_THREADS 64

#endif

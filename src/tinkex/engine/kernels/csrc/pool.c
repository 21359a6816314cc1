#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include "core.h"

/* Spinning is cheapest for a short wait; a longer one must yield the processor. */
enum { MAX_SPINS = 2000, MAX_YIELDS = 200 };
static const struct timespec SLEEP = {0, 50 * 1000};

static void cpu_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void back_off(int *waited) {
    ++*waited;
    if (*waited < MAX_SPINS)
        cpu_pause();
    else if (*waited < MAX_SPINS + MAX_YIELDS)
        sched_yield();
    else
        nanosleep(&SLEEP, NULL);
}

/* The thread pool of the process. `lock` guards all fields below it except the atomics. */
static struct {
    pthread_mutex_t in_use; /* held by the caller whose job the helpers run */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int num_helpers;
    int wanted; /* helpers that may join the job; 0 if there is no job */
    tinkex_job job;
    void *context;
    tinkex_counter *counters;
    atomic_long generation;
    atomic_int active; /* helpers inside the job */
} pool = {.in_use = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static void *run_helper(void *argument) {
    const int worker = (int)(long)argument;
    long seen = 0;
    for (;;) {
        for (int spins = 0; spins < MAX_SPINS && atomic_load(&pool.generation) == seen; spins++) cpu_pause();
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.generation) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
        seen = atomic_load(&pool.generation);
        if (worker > pool.wanted) {
            pthread_mutex_unlock(&pool.lock);
            continue;
        }
        atomic_fetch_add(&pool.active, 1);
        tinkex_thread thread = {pool.counters, pool.wanted + 1, worker, 0};
        const tinkex_job job = pool.job;
        void *context = pool.context;
        pthread_mutex_unlock(&pool.lock);
        job(&thread, context);
        atomic_fetch_sub(&pool.active, 1);
    }
    return NULL;
}

/* A forked child has no threads, so it starts without helpers. */
static void reset_after_fork(void) {
    pthread_mutex_init(&pool.in_use, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pool.num_helpers = 0;
    pool.wanted = 0;
    atomic_store(&pool.active, 0);
}

static void register_fork_handler(void) { pthread_atfork(NULL, NULL, reset_after_fork); }

static void start_helpers(int wanted) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_fork_handler);
    while (pool.num_helpers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, run_helper, (void *)(long)(pool.num_helpers + 1)) != 0)
            return; /* fewer helpers compute the same result, more slowly */
        pthread_detach(thread);
        pool.num_helpers++;
    }
}

static tinkex_counter *new_counters(int num_phases, int *num_threads) {
    if (*num_threads > TINKEX_MAX_THREADS) *num_threads = TINKEX_MAX_THREADS;
    if (*num_threads < 1) *num_threads = 1;
    const size_t num_counters = (size_t)num_phases * (size_t)(*num_threads + 1);
    tinkex_counter *counters = aligned_alloc(64, num_counters * sizeof(tinkex_counter));
    if (counters == NULL) return NULL;
    for (size_t i = 0; i < num_counters; i++) atomic_init(&counters[i].value, 0);
    return counters;
}

int tinkex_run(tinkex_job job, void *context, int num_phases, int num_threads) {
    tinkex_counter *counters = new_counters(num_phases, &num_threads);
    if (counters == NULL) return TINKEX_NO_MEMORY;
    tinkex_thread thread = {counters, num_threads, 0, 0};
    /* If another job has the helpers, this one runs on the calling thread alone, with the same result. */
    const int helped = num_threads > 1 && pthread_mutex_trylock(&pool.in_use) == 0;
    if (helped) {
        pthread_mutex_lock(&pool.lock);
        start_helpers(num_threads - 1);
        pool.job = job;
        pool.context = context;
        pool.counters = counters;
        pool.wanted = num_threads - 1;
        atomic_fetch_add(&pool.generation, 1);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    job(&thread, context);
    if (helped) {
        pthread_mutex_lock(&pool.lock);
        pool.wanted = 0; /* helpers that wake up late do not join */
        pthread_mutex_unlock(&pool.lock);
        for (int waited = 0; atomic_load(&pool.active) > 0;) back_off(&waited);
        pthread_mutex_unlock(&pool.in_use);
    }
    free(counters);
    return TINKEX_OK;
}

typedef struct {
    tinkex_job job;
    void *context;
    tinkex_counter *counters;
    int num_workers;
    atomic_int arrived;
} team_job;

static void run_team_member(void *context) {
    team_job *shared = context;
    const int worker = atomic_fetch_add(&shared->arrived, 1);
    if (worker >= shared->num_workers) return;
    tinkex_thread thread = {shared->counters, shared->num_workers, worker, 0};
    shared->job(&thread, shared->context);
}

int tinkex_run_in_team(tinkex_team team, tinkex_job job, void *context, int num_phases, int num_threads) {
    tinkex_counter *counters = new_counters(num_phases, &num_threads);
    if (counters == NULL) return TINKEX_NO_MEMORY;
    team_job shared = {job, context, counters, num_threads, 0};
    team(run_team_member, &shared, (unsigned)num_threads, 0);
    free(counters);
    return TINKEX_OK;
}

void tinkex_parallel_for(tinkex_thread *thread, long num_tasks, tinkex_task task, const void *context) {
    const int workers = thread->num_workers;
    tinkex_counter *taken = thread->counters + (size_t)thread->phase++ * (size_t)(workers + 1);
    atomic_long *done = &taken[workers].value;
    long mine = 0;
    for (int i = 0; i < workers; i++) {
        const int owner = (thread->worker + i) % workers;
        const long start = owner * num_tasks / workers, end = (owner + 1) * num_tasks / workers;
        for (;;) {
            const long next = start + atomic_fetch_add(&taken[owner].value, 1);
            if (next >= end) break;
            task(context, next, thread->worker);
            mine++;
        }
    }
    if (mine > 0) atomic_fetch_add(done, mine);
    for (int waited = 0; atomic_load(done) < num_tasks;) back_off(&waited);
}

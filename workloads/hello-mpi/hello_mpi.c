/* Every rank sends its name to rank 0, which prints who answered: `ranks answered: 4 of 4`.
 *
 * Exit code 0 when all did; 3 when some did not within LIMIT seconds; 4 when MPI sees other ranks than were started,
 * as it does when mpirun and the library come from two different MPIs.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#ifndef LIMIT
#define LIMIT 30.0
#endif
#define LENGTH 256

struct answer {
    int rank;
    char host[LENGTH];
};

/* How many of the others have answered before the time is up; answered[rank] says which. */
static int collect(struct answer *answers, char *answered, int world)
{
    const struct timespec pause = {.tv_nsec = 1000 * 1000};
    MPI_Request *requests = malloc(sizeof *requests * world);
    double deadline = MPI_Wtime() + LIMIT;
    int count = 0;

    requests[0] = MPI_REQUEST_NULL;
    for (int rank = 1; rank < world; rank++)
        MPI_Irecv(&answers[rank], sizeof *answers, MPI_BYTE, rank, 0, MPI_COMM_WORLD, &requests[rank]);
    while (count < world - 1 && MPI_Wtime() < deadline) {
        int rank, found;
        MPI_Testany(world, requests, &rank, &found, MPI_STATUS_IGNORE);
        if (found && rank != MPI_UNDEFINED) {
            answered[rank] = answers[rank].rank == rank;
            count += answered[rank];
        } else {
            nanosleep(&pause, NULL); /* ranks may share a core */
        }
    }
    free(requests);
    return count;
}

static int report(struct answer *own, int world)
{
    struct answer *answers = calloc(world, sizeof *answers);
    char *answered = calloc(world, 1);
    int count = 1 + collect(answers, answered, world);

    answers[0] = *own;
    answered[0] = 1;
    for (int rank = 0; rank < world; rank++)
        if (answered[rank])
            printf("answer from rank %d on %s\n", rank, answers[rank].host);
        else
            printf("no answer from rank %d within %g s\n", rank, (double)LIMIT);
    printf("ranks answered: %d of %d\n", count, world);
    fflush(stdout);
    return count == world ? 0 : 3;
}

int main(int argc, char **argv)
{
    struct answer own = {0};
    const char *started = getenv("WORLD_SIZE");
    int world, code = 0;

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &own.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    gethostname(own.host, LENGTH - 1);
    printf("hello from rank %d of %d on %s\n", own.rank, world, own.host);
    fflush(stdout);
    if (started && atoi(started) != world) {
        printf("hello_mpi: %s ranks were started, MPI sees %d: are mpirun and mpicc of the same MPI?\n", started, world);
        fflush(stdout);
        MPI_Abort(MPI_COMM_WORLD, 4);
    }
    if (own.rank == 0)
        code = report(&own, world);
    else
        MPI_Send(&own, sizeof own, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
    if (code)
        MPI_Abort(MPI_COMM_WORLD, code); /* MPI_Finalize would wait for those that did not answer */
    MPI_Finalize();
    return 0;
}

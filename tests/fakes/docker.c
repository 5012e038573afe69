/* A docker for tests: client and daemon in one program, with the parts of docker that a supervisor notices.
 *
 *   docker run [options] --entrypoint PROGRAM IMAGE ARGUMENTS...
 *       starts PROGRAM in a pid namespace and a session of its own, below a shim that is nobody's child here, stays in the
 *       foreground, passes SIGTERM on, and ends with the program's status; killed, it leaves the container behind
 *   docker rm --force NAME
 *       kills the container of that name
 *
 * Containers are files in $FAKE_DOCKER, named as they are, holding the pid. Needs root, as a daemon does.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define SHIM "containerd-shim"

static volatile pid_t container;

static void pass_on(int sig) { kill(container, sig); }

static const char *file_of(const char *name) {
    static char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("FAKE_DOCKER"), name);
    return path;
}

static int rm(const char *name) {
    int pid;
    FILE *file = fopen(file_of(name), "r");
    if (!file || fscanf(file, "%d", &pid) != 1) {
        fprintf(stderr, "Error response from daemon: No such container: %s\n", name);
        return 1;
    }
    kill(pid, SIGKILL);
    while (access(file_of(name), F_OK) == 0)
        usleep(1000);
    return 0;
}

/* The daemon's part: the container's first process, and a shim that outlives every client. */
static void shim(int report, const char *name, char **argv) {
    int status;
    setsid();
    if (unshare(CLONE_NEWPID))
        _exit(125);
    pid_t pid = fork();
    if (!pid) {
        setsid();
        execvp(argv[0], argv);
        _exit(127);
    }
    FILE *file = fopen(file_of(name), "w");
    fprintf(file, "%d\n", pid);
    fclose(file);
    signal(SIGPIPE, SIG_IGN);
    close(1);
    close(2);
    if (write(report, &pid, sizeof pid) < 0 || waitpid(pid, &status, 0) < 0)
        _exit(125);
    unlink(file_of(name));
    status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    _exit(write(report, &status, sizeof status) < 0);
}

static int run(int argc, char **argv) {
    const char *name = "nameless", *program = NULL;
    int pipes[2], status = 125;
    pid_t pid;
    for (; *argv && **argv == '-'; argv++) {
        if (!strcmp(*argv, "--name"))
            name = *++argv;
        else if (!strcmp(*argv, "--entrypoint"))
            program = *++argv;
        else if (!strcmp(*argv, "--env") || !strcmp(*argv, "--gpus") || !strcmp(*argv, "--ipc") || !strcmp(*argv, "--network"))
            argv++;
    }
    if (!program || !*argv || access(file_of(name), F_OK) == 0 || pipe(pipes)) {
        fprintf(stderr, "docker: Error response from daemon: Conflict. The container name is already in use: %s\n", name);
        return 125;
    }
    *argv = (char *)program; /* in the image's place */
    if (!(pid = fork())) {
        if (!fork()) {
            char report[12], *words[argc + 4];
            snprintf(report, sizeof report, "%d", pipes[1]);
            words[0] = SHIM, words[1] = report, words[2] = (char *)name;
            for (int i = 0; (words[3 + i] = argv[i]); i++)
                ;
            execv("/proc/self/exe", words); /* it is no client, and must not look like one */
        }
        _exit(0);
    }
    waitpid(pid, NULL, 0);
    close(pipes[1]);
    if (read(pipes[0], &pid, sizeof pid) != sizeof pid)
        return 125;
    container = pid;
    signal(SIGTERM, pass_on);
    while (read(pipes[0], &status, sizeof status) < 0 && errno == EINTR)
        ;
    return status;
}

int main(int argc, char **argv) {
    if (!strcmp(argv[0], SHIM))
        shim(atoi(argv[1]), argv[2], argv + 3);
    if (argc == 4 && !strcmp(argv[1], "rm") && !strcmp(argv[2], "--force"))
        return rm(argv[3]);
    if (argc > 2 && !strcmp(argv[1], "run"))
        return run(argc, argv + 2);
    return 125;
}

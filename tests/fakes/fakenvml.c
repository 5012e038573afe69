/* A libnvidia-ml.so.1 that says what a file tells it to say.
 *
 * The file, named by $FAKE_NVML_CONF, is read again at every call. One setting or GPU per line:
 *   driver=580.95.05          the driver's version
 *   init=9                    error that nvmlInit returns
 *   init_fails=2              nvmlInit fails that many times with the error above, then works (counted in FILE.inits)
 *   hang=1                    nvmlInit never returns
 *   crash_at_exit=1           the process dies as the library is unloaded
 *   name=NVIDIA GB10;mem=unsupported;procs=123:4096,456:-1
 * Keys of a GPU, all optional, parted by ';':
 *   name uuid
 *   mem=TOTAL:FREE (bytes), mem=unsupported, mem=nopermission, mem=error:CODE
 *   procs=PID:BYTES,...       compute processes; -1 bytes: not available
 *   graphics=PID:BYTES,...    graphics processes
 *   work=PID:PERCENT,...      samples of how much of the GPU processes used a second ago
 *   procs_error=CODE          error of both process lists
 *   lost=1                    every call about this GPU returns GPU_IS_LOST
 *   handle_error=CODE         the GPU cannot even be opened
 *   hang=1 crash=1            what its memory query does instead of answering
 *   mig=1                     MIG is on
 *   temp power util cc        for the pages that show them
 * A line that starts with "slice;" describes a MIG slice of the GPU before it, with the same keys.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef unsigned int u32;
typedef unsigned long long u64;

enum {
    SUCCESS = 0,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    GPU_IS_LOST = 15,
};

#define MOST_DEVICES 64
#define MOST_PROCESSES 64

struct process {
    u32 pid;
    u64 used;
};

struct list {
    int count;
    struct process rows[MOST_PROCESSES];
};

struct device {
    char name[96], uuid[96];
    int parent; /* index of the GPU that this is a slice of, or -1 */
    int mem_error, procs_error, handle_error;
    int lost, hang, crash, mig;
    u64 total, free;
    int major, minor, temp, power, util;
    struct list compute, graphics, work;
};

/* As nvml.h lays them out. */
struct memory { u64 total, free, used; };
struct memory_v2 { u32 version; u64 total, reserved, free, used; };
struct process_info { u32 pid; u64 used; u32 gpu_instance, compute_instance; };
struct sample { u32 pid; u64 microseconds; u32 compute, memory, encoder, decoder; };
struct utilization { u32 gpu, memory; };
struct temperature { u32 version, sensor; int celsius; };

static struct device devices[MOST_DEVICES];
static int count, init_error, init_fails, init_hangs, crash_at_exit;
static char driver[64];

static void read_list(struct list *list, const char *text)
{
    while (*text && list->count < MOST_PROCESSES) {
        char *end;
        struct process *row = &list->rows[list->count++];
        row->pid = strtoul(text, &end, 10);
        row->used = *end == ':' ? (u64)strtoll(end + 1, &end, 10) : 0;
        if (*end != ',')
            break;
        text = end + 1;
    }
}

static void read_memory(struct device *device, const char *text)
{
    device->mem_error = SUCCESS;
    if (!strcmp(text, "unsupported"))
        device->mem_error = NOT_SUPPORTED;
    else if (!strcmp(text, "nopermission"))
        device->mem_error = NO_PERMISSION;
    else if (!strncmp(text, "error:", 6))
        device->mem_error = atoi(text + 6);
    else
        sscanf(text, "%llu:%llu", &device->total, &device->free);
}

static void read_device(struct device *device, char *line)
{
    char *rest = NULL;
    for (char *field = strtok_r(line, ";", &rest); field; field = strtok_r(NULL, ";", &rest)) {
        char *value = strchr(field, '=');
        if (!value)
            continue;
        *value++ = 0;
        int number = atoi(value);
        if (!strcmp(field, "name"))
            snprintf(device->name, sizeof device->name, "%s", value);
        else if (!strcmp(field, "uuid"))
            snprintf(device->uuid, sizeof device->uuid, "%s", value);
        else if (!strcmp(field, "mem"))
            read_memory(device, value);
        else if (!strcmp(field, "procs"))
            read_list(&device->compute, value);
        else if (!strcmp(field, "graphics"))
            read_list(&device->graphics, value);
        else if (!strcmp(field, "work"))
            read_list(&device->work, value);
        else if (!strcmp(field, "procs_error"))
            device->procs_error = number;
        else if (!strcmp(field, "handle_error"))
            device->handle_error = number;
        else if (!strcmp(field, "lost"))
            device->lost = number;
        else if (!strcmp(field, "hang"))
            device->hang = number;
        else if (!strcmp(field, "crash"))
            device->crash = number;
        else if (!strcmp(field, "mig"))
            device->mig = number;
        else if (!strcmp(field, "cc"))
            sscanf(value, "%d.%d", &device->major, &device->minor);
        else if (!strcmp(field, "temp"))
            device->temp = number;
        else if (!strcmp(field, "power"))
            device->power = number;
        else if (!strcmp(field, "util"))
            device->util = number;
    }
}

static void load(void)
{
    const char *path = getenv("FAKE_NVML_CONF");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[8192];
    int gpu = -1;

    count = init_error = init_fails = init_hangs = crash_at_exit = 0;
    strcpy(driver, "580.95.05");
    if (!file) {
        init_error = DRIVER_NOT_LOADED;
        return;
    }
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (!line[0] || line[0] == '#')
            continue;
        if (!strncmp(line, "init=", 5)) {
            init_error = atoi(line + 5);
        } else if (!strncmp(line, "init_fails=", 11)) {
            init_fails = atoi(line + 11);
        } else if (!strncmp(line, "hang=", 5)) {
            init_hangs = atoi(line + 5);
        } else if (!strncmp(line, "crash_at_exit=", 14)) {
            crash_at_exit = atoi(line + 14);
        } else if (!strncmp(line, "driver=", 7)) {
            snprintf(driver, sizeof driver, "%s", line + 7);
        } else if (count < MOST_DEVICES) {
            struct device *device = &devices[count];
            memset(device, 0, sizeof *device);
            device->parent = strncmp(line, "slice;", 6) ? -1 : gpu;
            if (device->parent < 0)
                gpu = count;
            device->major = 9;
            device->mem_error = NOT_SUPPORTED;
            strcpy(device->name, "NVIDIA Fake");
            snprintf(device->uuid, sizeof device->uuid, "%s-00000000-0000-0000-0000-%012d", device->parent < 0 ? "GPU" : "MIG", count);
            read_device(device, line);
            count++;
        }
    }
    fclose(file);
}

static int init(void)
{
    load();
    while (init_hangs)
        pause();
    if (init_fails) {
        char path[4096];
        int done = 0;
        snprintf(path, sizeof path, "%s.inits", getenv("FAKE_NVML_CONF"));
        FILE *file = fopen(path, "r");
        if (file) {
            if (fscanf(file, "%d", &done) != 1)
                done = 0;
            fclose(file);
        }
        if (done >= init_fails)
            return SUCCESS;
        file = fopen(path, "w");
        fprintf(file, "%d\n", done + 1);
        fclose(file);
    }
    return init_error;
}

/* The n-th slice of a GPU, or with parent -1 the n-th GPU. A handle is the index plus one. */
static int find(int parent, u32 nth, void **handle)
{
    for (int i = 0; i < count; i++) {
        if (devices[i].parent != parent || nth--)
            continue;
        *handle = (void *)(long)(i + 1);
        return devices[i].handle_error;
    }
    return parent < 0 ? INVALID_ARGUMENT : NOT_FOUND;
}

static int open_device(void *handle, struct device **device)
{
    long index = (long)handle - 1;
    load();
    if (index < 0 || index >= count)
        return INVALID_ARGUMENT;
    *device = &devices[index];
    return (*device)->lost ? GPU_IS_LOST : SUCCESS;
}

#define OPEN(handle)                            \
    struct device *device;                      \
    int error = open_device((handle), &device); \
    if (error)                                  \
        return error;

static int list_processes(struct device *device, struct list *list, u32 *size, struct process_info *rows)
{
    if (device->procs_error)
        return device->procs_error;
    if (list->count && (!rows || (int)*size < list->count)) {
        *size = list->count;
        return INSUFFICIENT_SIZE;
    }
    for (int i = 0; i < list->count; i++)
        rows[i] = (struct process_info){list->rows[i].pid, list->rows[i].used, ~0u, ~0u};
    *size = list->count;
    return SUCCESS;
}

int nvmlDeviceGetProcessUtilization(void *handle, struct sample *rows, u32 *size, u64 since)
{
    OPEN(handle)
    u64 now = (u64)time(NULL) * 1000000 - 1000000;
    if (!device->work.count || now < since)
        return NOT_FOUND;
    if (!rows || (int)*size < device->work.count) {
        *size = device->work.count;
        return INSUFFICIENT_SIZE;
    }
    for (int i = 0; i < device->work.count; i++)
        rows[i] = (struct sample){device->work.rows[i].pid, now, (u32)device->work.rows[i].used, 0, 0, 0};
    *size = device->work.count;
    return SUCCESS;
}

static int ask_memory(struct device *device)
{
    if (device->crash)
        raise(SIGSEGV);
    while (device->hang)
        pause();
    return device->mem_error;
}

int nvmlInit_v2(void)
{
    return init();
}

int nvmlInitWithFlags(u32 flags)
{
    (void)flags;
    return init();
}

__attribute__((destructor)) static void unload(void)
{
    if (crash_at_exit)
        raise(SIGSEGV);
}

int nvmlShutdown(void)
{
    return SUCCESS;
}

const char *nvmlErrorString(int code)
{
    return code == NOT_SUPPORTED ? "Not Supported" : code == SUCCESS ? "Success" : "Error";
}

int nvmlSystemGetDriverVersion(char *text, u32 size)
{
    load();
    snprintf(text, size, "%s", driver);
    return SUCCESS;
}

int nvmlSystemGetNVMLVersion(char *text, u32 size)
{
    load();
    snprintf(text, size, "13.%s", driver);
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    *version = 13000;
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(u32 *number)
{
    load();
    *number = 0;
    for (int i = 0; i < count; i++)
        *number += devices[i].parent < 0;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(u32 index, void **handle)
{
    load();
    return find(-1, index, handle);
}

int nvmlDeviceGetName(void *handle, char *text, u32 size)
{
    OPEN(handle)
    snprintf(text, size, "%s", device->name);
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *text, u32 size)
{
    OPEN(handle)
    snprintf(text, size, "%s", device->uuid);
    return SUCCESS;
}

int nvmlDeviceGetIndex(void *handle, u32 *index)
{
    OPEN(handle)
    *index = 0;
    for (struct device *other = devices; other < device; other++)
        *index += other->parent == device->parent;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory)
{
    OPEN(handle)
    error = ask_memory(device);
    if (!error)
        *memory = (struct memory){device->total, device->free, device->total - device->free};
    return error;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory)
{
    OPEN(handle)
    error = ask_memory(device);
    if (!error)
        *memory = (struct memory_v2){memory->version, device->total, 0, device->free, device->total - device->free};
    return error;
}

int nvmlDeviceGetMigMode(void *handle, u32 *current, u32 *pending)
{
    OPEN(handle)
    if (device->parent >= 0)
        return INVALID_ARGUMENT;
    *current = *pending = device->mig;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, u32 *number)
{
    OPEN(handle)
    *number = device->mig ? 7 : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, u32 index, void **slice)
{
    OPEN(handle)
    return find(device - devices, index, slice);
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, u32 *size, struct process_info *rows)
{
    OPEN(handle)
    return list_processes(device, &device->compute, size, rows);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, u32 *size, struct process_info *rows)
{
    OPEN(handle)
    return list_processes(device, &device->graphics, size, rows);
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor)
{
    OPEN(handle)
    *major = device->major;
    *minor = device->minor;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(void *handle, int sensor, u32 *celsius)
{
    (void)sensor;
    OPEN(handle)
    *celsius = device->temp;
    return SUCCESS;
}

int nvmlDeviceGetTemperatureV(void *handle, struct temperature *temperature)
{
    OPEN(handle)
    temperature->celsius = device->temp;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *handle, u32 *milliwatts)
{
    OPEN(handle)
    *milliwatts = device->power;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *handle, struct utilization *rates)
{
    OPEN(handle)
    *rates = (struct utilization){device->util, 0};
    return SUCCESS;
}

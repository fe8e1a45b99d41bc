/* daq_towpath.c: a module of libdaq 3 whose packets come from a queue of a Towpath engine. `build` compiles it; the guide is
 * docs/book/src/guides/snort.md.
 *
 * An instance is one inspector of the queue. The ring's memory is read-only and Snort changes packets in place, so each packet is copied into
 * a buffer of the instance's pool. A buffer belongs to the host from msg_receive to msg_finalize. When the engine ends, the instance attaches
 * again; the verdicts on packets of the engine before have no effect.
 *
 * The host calls the functions of an instance in one thread. interrupt may be called in any thread and in a signal handler. */
#include <errno.h>
#include <net/if.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <daq_module_api.h>
#include <towpath.h>

#define MODULE_VERSION 1
#define DIRECTORY "/run/towpath"
/* Buffers of a pool, and bytes of each, unless the host names others. */
#define POOL 256
#define SNAPLEN 65535
/* Frames that one call of the library receives. */
#define BATCH 64
/* Milliseconds between two attempts to attach again. */
#define RETRY 100
/* Link types: of files (towpath_frame.link_type), and of the host (pcap(3)). */
#define LINKTYPE_ETHERNET 1
#define LINKTYPE_RAW 101
#define DLT_ETHERNET 1
#define DLT_RAW_IP 12

struct instance;

/* A packet that the host has, or a free buffer. */
struct buffer {
    DAQ_Msg_t message;
    DAQ_PktHdr_t header;
    struct towpath_frame frame;
    unsigned attachment; /* instance.attachment at the time of its receipt */
    bool lent;           /* the host has it */
    bool held;           /* other packets do not wait for its verdict */
    struct buffer *next; /* of the free buffers */
};

struct instance {
    DAQ_ModuleInstance_h module;
    char *path; /* of the queue's socket; NULL: that of the engine that has started this process */
    int timeout; /* milliseconds; -1: none */
    unsigned snaplen;
    bool raw, passive;
    atomic_bool interrupted;
    int wake; /* an eventfd: interrupt was called */
    bool unreadable; /* a packet begins with another link header than the configuration says */
    struct buffer *buffers, *free;
    uint8_t *memory;
    DAQ_MsgPoolInfo_t pool;
    towpath_inspector *inspector; /* NULL: the engine is gone, or the instance does not run */
    unsigned attachment;
    struct timespec tried; /* the last attempt to attach */
    uint64_t lost;
    DAQ_Stats_t stats;
};

static DAQ_BaseAPI_t base;

static const DAQ_VariableDesc_t variables[] = {
    {"directory", "directory of the sockets queue-N.sock (default: " DIRECTORY ")", DAQ_VAR_DESC_REQUIRES_ARGUMENT},
    {"link", "what packets begin with: ethernet (default), or raw: the IP header, for ports of every kind", DAQ_VAR_DESC_REQUIRES_ARGUMENT},
};

static int load(const DAQ_BaseAPI_t *api)
{
    if (api->api_version != DAQ_BASE_API_VERSION || api->api_size != sizeof base)
        return DAQ_ERROR;
    base = *api;
    return DAQ_SUCCESS;
}

static int unload(void)
{
    memset(&base, 0, sizeof base);
    return DAQ_SUCCESS;
}

static int get_variable_descs(const DAQ_VariableDesc_t **descriptions)
{
    *descriptions = variables;
    return sizeof variables / sizeof *variables;
}

static void destroy(void *handle)
{
    struct instance *of = handle;
    towpath_inspector_close(of->inspector);
    if (of->wake >= 0)
        close(of->wake);
    free(of->buffers);
    free(of->memory);
    free(of->path);
    free(of);
}

/* The path of the socket that the input of the configuration names. Returns false, with a message, if it names none. */
static bool find_socket(struct instance *of, const char *input, const char *directory)
{
    char *end;
    if (input == NULL || *input == '\0' || strcmp(input, "engine") == 0) {
        if (getenv("TOWPATH_SOCKET") != NULL)
            return true;
        base.set_errbuf(of->module, "towpath: name a queue's number or socket as the interface: no engine has started this program");
        return false;
    }
    if (strchr(input, '/') != NULL) {
        of->path = strdup(input);
    } else {
        unsigned long number = strtoul(input, &end, 10);
        if (*end != '\0' || number < 1 || number > 65535) {
            base.set_errbuf(of->module, "towpath: `%s` is no queue: write its number, 1 to 65535, or the path of its socket", input);
            return false;
        }
        size_t size = strlen(directory) + sizeof "/queue-65535.sock";
        of->path = malloc(size);
        if (of->path != NULL)
            snprintf(of->path, size, "%s/queue-%lu.sock", directory, number);
    }
    if (of->path == NULL)
        base.set_errbuf(of->module, "towpath: out of memory");
    return of->path != NULL;
}

static bool make_pool(struct instance *of, unsigned size)
{
    of->buffers = calloc(size, sizeof *of->buffers);
    of->memory = malloc((size_t)size * of->snaplen);
    if (of->buffers == NULL || of->memory == NULL) {
        base.set_errbuf(of->module, "towpath: no memory for %u buffers of %u bytes", size, of->snaplen);
        return false;
    }
    of->pool.size = of->pool.available = size;
    of->pool.mem_size = (size_t)size * (sizeof *of->buffers + of->snaplen);
    for (unsigned at = size; at-- > 0;) {
        struct buffer *buffer = &of->buffers[at];
        buffer->message.type = DAQ_MSG_TYPE_PACKET;
        buffer->message.hdr = &buffer->header;
        buffer->message.hdr_len = sizeof buffer->header;
        buffer->message.data = of->memory + (size_t)at * of->snaplen;
        buffer->message.owner = of->module;
        buffer->message.priv = buffer;
        buffer->next = of->free;
        of->free = buffer;
    }
    return true;
}

static int instantiate(const DAQ_ModuleConfig_h config, DAQ_ModuleInstance_h module, void **handle)
{
    const char *directory = DIRECTORY, *key = NULL, *value = NULL;
    struct instance *of = calloc(1, sizeof *of);
    if (of == NULL) {
        base.set_errbuf(module, "towpath: out of memory");
        return DAQ_ERROR_NOMEM;
    }
    of->module = module;
    of->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (of->wake < 0) {
        base.set_errbuf(module, "towpath: eventfd: %s", strerror(errno));
        destroy(of);
        return DAQ_ERROR;
    }
    for (int more = base.config_first_variable(config, &key, &value); more == DAQ_SUCCESS && key != NULL;
         more = base.config_next_variable(config, &key, &value)) {
        bool known = false;
        if (strcmp(key, "directory") == 0 && value != NULL) {
            directory = value;
            known = true;
        } else if (strcmp(key, "link") == 0 && value != NULL) {
            of->raw = strcmp(value, "raw") == 0;
            known = of->raw || strcmp(value, "ethernet") == 0;
        }
        if (!known) {
            base.set_errbuf(module, "towpath: `%s` is no variable, or has not this value: directory=PATH, link=ethernet, link=raw", key);
            destroy(of);
            return DAQ_ERROR_INVAL;
        }
    }
    switch (base.config_get_mode(config)) {
    case DAQ_MODE_READ_FILE:
        base.set_errbuf(module, "towpath: files are not read; see `towpath replay`");
        destroy(of);
        return DAQ_ERROR_NOTSUP;
    case DAQ_MODE_PASSIVE:
        of->passive = true;
        break;
    default:
        break;
    }
    unsigned timeout = base.config_get_timeout(config), size = base.config_get_msg_pool_size(config);
    int snaplen = base.config_get_snaplen(config);
    of->timeout = timeout == 0 ? -1 : timeout > INT32_MAX ? INT32_MAX : (int)timeout;
    of->snaplen = snaplen > 0 ? (unsigned)snaplen : SNAPLEN;
    if (!find_socket(of, base.config_get_input(config), directory)) {
        destroy(of);
        return DAQ_ERROR_INVAL;
    }
    if (!make_pool(of, size > 0 ? size : POOL)) {
        destroy(of);
        return DAQ_ERROR_NOMEM;
    }
    *handle = of;
    return DAQ_SUCCESS;
}

static int attach(struct instance *of)
{
    /* Losses are counted in each frame. */
    int result = towpath_inspector_attach(of->path, "snort", TOWPATH_NO_GAPS, &of->inspector);
    if (result < 0)
        of->inspector = NULL;
    else
        of->attachment++;
    clock_gettime(CLOCK_MONOTONIC, &of->tried);
    return result;
}

static void detach(struct instance *of)
{
    towpath_inspector_close(of->inspector);
    of->inspector = NULL;
    clock_gettime(CLOCK_MONOTONIC, &of->tried);
}

static int start(void *handle)
{
    struct instance *of = handle;
    int result = attach(of);
    if (result < 0) {
        base.set_errbuf(of->module, "towpath: %s", towpath_error());
        return result == -ENOENT || result == -ECONNREFUSED ? DAQ_ERROR_NODEV : DAQ_ERROR;
    }
    return DAQ_SUCCESS;
}

/* Packets without a verdict get the default verdict of the queue. */
static int stop(void *handle)
{
    detach(handle);
    return DAQ_SUCCESS;
}

/* Async-signal-safe. */
static int interrupt(void *handle)
{
    struct instance *of = handle;
    uint64_t one = 1;
    int before = errno;
    /* First: a wait that the eventfd ends looks at it. */
    atomic_store(&of->interrupted, true);
    /* A full counter wakes, too. */
    ssize_t written = write(of->wake, &one, sizeof one);
    (void)written;
    errno = before;
    return DAQ_SUCCESS;
}

/* Milliseconds from `since` to now. */
static int64_t elapsed(const struct timespec *since)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)(now.tv_sec - since->tv_sec) * 1000 + (now.tv_nsec - since->tv_nsec) / 1000000;
}

/* Waits for frames, for `left` milliseconds at most (-1: no limit). */
static DAQ_RecvStatus wait_for_frames(struct instance *of, int64_t left)
{
    struct pollfd descriptors[2] = {{.fd = of->wake, .events = POLLIN}, {.fd = -1, .events = POLLIN}};
    int armed = 0, ready, limit = left < 0 ? -1 : left > INT32_MAX ? INT32_MAX : (int)left;
    if (of->inspector == NULL) {
        int64_t due = RETRY - elapsed(&of->tried);
        if (due <= 0) {
            attach(of);
            return DAQ_RSTAT_OK;
        }
        if (limit < 0 || due < limit)
            limit = (int)due;
    } else {
        armed = towpath_inspector_arm(of->inspector);
        if (armed < 0)
            detach(of);
        if (armed != 1)
            return DAQ_RSTAT_OK;
        descriptors[1].fd = towpath_inspector_fd(of->inspector);
    }
    ready = poll(descriptors, 2, limit);
    int error = errno;
    if (ready > 0 && descriptors[0].revents != 0) {
        uint64_t count;
        ssize_t taken = read(of->wake, &count, sizeof count);
        (void)taken;
    }
    if (armed == 1 && towpath_inspector_disarm(of->inspector) < 0)
        detach(of);
    if (ready < 0 && error != EINTR) {
        base.set_errbuf(of->module, "towpath: poll: %s", strerror(error));
        return DAQ_RSTAT_ERROR;
    }
    return DAQ_RSTAT_OK;
}

/* Fills a buffer with the packet. Returns false if the host cannot have it: then it was decided. */
static bool fill(struct instance *of, struct buffer *buffer, const struct towpath_frame *frame)
{
    unsigned skip = of->raw ? frame->network : 0;
    if (skip > frame->len)
        skip = frame->len;
    const uint8_t *bytes = frame->payload + skip;
    size_t len = frame->len - skip;
    uint8_t version = len > 0 ? bytes[0] >> 4 : 0;
    if (frame->kind != TOWPATH_PACKET || (of->raw && version != 4 && version != 6)) {
        /* ARP, and other frames without an IP header. */
        of->stats.packets_filtered++;
        towpath_inspector_verdict(of->inspector, frame, TOWPATH_PASS);
        return false;
    }
    if (!of->raw && frame->link_type != LINKTYPE_ETHERNET) {
        of->unreadable = true;
        towpath_inspector_verdict(of->inspector, frame, TOWPATH_DROP);
        return false;
    }
    buffer->frame = *frame;
    buffer->attachment = of->attachment;
    buffer->lent = true;
    buffer->held = false;
    buffer->message.data_len = len < of->snaplen ? len : of->snaplen;
    memcpy(buffer->message.data, bytes, buffer->message.data_len);
    buffer->header = (DAQ_PktHdr_t){
        .ts = {.tv_sec = frame->time / 1000000000, .tv_usec = frame->time % 1000000000 / 1000},
        .pktlen = frame->wire_len > skip ? frame->wire_len - skip : len,
        .ingress_index = frame->ingress ? (int32_t)frame->ingress : DAQ_PKTHDR_UNKNOWN,
        .egress_index = frame->egress ? (int32_t)frame->egress : DAQ_PKTHDR_UNKNOWN,
        /* The engine's number of the port. `inject` sends by it. */
        .ingress_group = (int16_t)frame->port,
        .egress_group = DAQ_PKTHDR_UNKNOWN,
        .opaque = frame->mark,
        .flow_id = frame->hash,
        .flags = of->passive ? DAQ_PKT_FLAG_NOT_FORWARDING : 0,
    };
    if (frame->mark != 0)
        buffer->header.flags |= DAQ_PKT_FLAG_OPAQUE_IS_VALID;
    if (frame->hash != 0)
        buffer->header.flags |= DAQ_PKT_FLAG_FLOWID_IS_VALID;
    return true;
}

/* The host keeps packets of an earlier call: the ring goes on without their verdicts. */
static void hold(struct instance *of)
{
    for (unsigned at = 0; at < of->pool.size; at++) {
        struct buffer *buffer = &of->buffers[at];
        if (buffer->lent && !buffer->held && buffer->attachment == of->attachment) {
            towpath_inspector_verdict(of->inspector, &buffer->frame, TOWPATH_HOLD);
            buffer->held = true;
        }
    }
}

/* Receives frames without waiting. Returns the number of messages. */
static unsigned take(struct instance *of, unsigned max, const DAQ_Msg_t *messages[])
{
    struct towpath_frame frames[BATCH];
    unsigned count = 0;
    while (of->inspector != NULL && count < max && of->free != NULL) {
        unsigned room = max - count < of->pool.available ? max - count : of->pool.available;
        int received = towpath_inspector_recv_batch(of->inspector, frames, room < BATCH ? room : BATCH, 0);
        if (received == -EAGAIN || received == -EINTR)
            break;
        if (received <= 0) {
            /* The engine has ended, or it wrote invalid data. */
            detach(of);
            break;
        }
        for (int at = 0; at < received; at++) {
            struct buffer *buffer = of->free;
            of->stats.packets_received++;
            of->lost += frames[at].lost;
            if (!fill(of, buffer, &frames[at]))
                continue;
            of->free = buffer->next;
            of->pool.available--;
            messages[count++] = &buffer->message;
        }
        if (received < BATCH)
            break;
    }
    return count;
}

static unsigned msg_receive(void *handle, const unsigned max, const DAQ_Msg_t *messages[], DAQ_RecvStatus *status)
{
    struct instance *of = handle;
    struct timespec begun = {0};
    if (of->inspector != NULL && of->pool.available < of->pool.size)
        hold(of);
    for (;;) {
        int64_t left = -1;
        if (atomic_exchange(&of->interrupted, false)) {
            *status = DAQ_RSTAT_INTERRUPTED;
            return 0;
        }
        if (of->unreadable) {
            base.set_errbuf(of->module, "towpath: a packet does not begin with an Ethernet header; set the variable link=raw");
            *status = DAQ_RSTAT_ERROR;
            return 0;
        }
        if (of->free == NULL) {
            *status = DAQ_RSTAT_NOBUF;
            return 0;
        }
        unsigned count = take(of, max, messages);
        if (of->unreadable && count == 0)
            continue;
        if (count > 0 || max == 0) {
            *status = DAQ_RSTAT_OK;
            return count;
        }
        if (of->timeout >= 0) {
            if (begun.tv_sec == 0)
                clock_gettime(CLOCK_MONOTONIC, &begun);
            left = of->timeout - elapsed(&begun);
            if (left <= 0) {
                *status = DAQ_RSTAT_TIMEOUT;
                return 0;
            }
        }
        *status = wait_for_frames(of, left);
        if (*status != DAQ_RSTAT_OK)
            return 0;
    }
}

/* Passes the packet with the host's bytes in the place of those that the host has got. */
static int replace(struct instance *of, const struct buffer *buffer)
{
    const struct towpath_frame *frame = &buffer->frame;
    size_t skip = of->raw ? frame->network : 0, len = buffer->message.data_len;
    uint8_t *bytes = malloc(frame->len);
    if (bytes == NULL)
        return -ENOMEM;
    memcpy(bytes, frame->payload, frame->len);
    memcpy(bytes + skip, buffer->message.data, len);
    int result;
    do
        result = towpath_inspector_replace(of->inspector, frame, bytes, frame->len);
    while (result == -EINTR);
    free(bytes);
    return result;
}

static int msg_finalize(void *handle, const DAQ_Msg_t *message, DAQ_Verdict verdict)
{
    static const uint32_t verdicts[MAX_DAQ_VERDICT] = {
        [DAQ_VERDICT_PASS] = TOWPATH_PASS,
        [DAQ_VERDICT_BLOCK] = TOWPATH_DROP,
        [DAQ_VERDICT_REPLACE] = TOWPATH_PASS,
        [DAQ_VERDICT_WHITELIST] = TOWPATH_PASS | TOWPATH_FLOW,
        [DAQ_VERDICT_BLACKLIST] = TOWPATH_DROP | TOWPATH_FLOW,
        [DAQ_VERDICT_IGNORE] = TOWPATH_PASS | TOWPATH_FLOW,
    };
    struct instance *of = handle;
    struct buffer *buffer = message->priv;
    int result = 0;
    if (!buffer->lent) {
        base.set_errbuf(of->module, "towpath: this message has a verdict already");
        return DAQ_ERROR_INVAL;
    }
    if ((unsigned)verdict >= MAX_DAQ_VERDICT)
        verdict = DAQ_VERDICT_PASS;
    of->stats.verdicts[verdict]++;
    if (of->inspector != NULL && buffer->attachment == of->attachment) {
        if (of->passive)
            result = towpath_inspector_verdict(of->inspector, &buffer->frame, TOWPATH_PASS);
        else if (verdict == DAQ_VERDICT_REPLACE)
            result = replace(of, buffer);
        else
            result = towpath_inspector_verdict(of->inspector, &buffer->frame, verdicts[verdict]);
        /* A replacement that cannot be sent: a changed packet must not leave as it was. */
        if (result < 0 && result != -ESTALE && verdict == DAQ_VERDICT_REPLACE)
            towpath_inspector_verdict(of->inspector, &buffer->frame, TOWPATH_DROP);
    }
    buffer->lent = false;
    buffer->next = of->free;
    of->free = buffer;
    of->pool.available++;
    if (result < 0 && result != -ESTALE) {
        base.set_errbuf(of->module, "towpath: %s", towpath_error());
        return DAQ_ERROR;
    }
    return DAQ_SUCCESS;
}

/* Injects a packet near `frame`. With link=raw it begins with its IP header and gets the link header of that frame. */
static int send_packet(struct instance *of, const struct towpath_frame *near, uint32_t way, const uint8_t *link, size_t link_len,
                       const uint8_t *data, uint32_t len)
{
    int result;
    uint8_t *bytes = malloc(link_len + len);
    if (bytes == NULL) {
        base.set_errbuf(of->module, "towpath: out of memory");
        return DAQ_ERROR_NOMEM;
    }
    if (link_len > 0)
        memcpy(bytes, link, link_len);
    memcpy(bytes + link_len, data, len);
    /* The answer to an Ethernet frame goes back to its sender. */
    if (link_len >= 12 && near->link_type == LINKTYPE_ETHERNET && way == TOWPATH_INJECT_BACK) {
        memcpy(bytes, link + 6, 6);
        memcpy(bytes + 6, link, 6);
    }
    do
        result = towpath_inspector_inject(of->inspector, near, way, bytes, link_len + len);
    while (result == -EINTR);
    free(bytes);
    if (result < 0) {
        base.set_errbuf(of->module, "towpath: %s", towpath_error());
        return result == -EPERM ? DAQ_ERROR_NOTSUP : DAQ_ERROR;
    }
    towpath_inspector_flush(of->inspector);
    of->stats.packets_injected++;
    return DAQ_SUCCESS;
}

/* Sends a packet as if it had come in by the header's port (ingress_group). With link=raw only ports without link headers are possible. */
static int inject(void *handle, DAQ_MsgType type, const void *header, const uint8_t *data, uint32_t len)
{
    struct instance *of = handle;
    const DAQ_PktHdr_t *packet = header;
    struct towpath_frame near = {0};
    if (type != DAQ_MSG_TYPE_PACKET)
        return DAQ_ERROR_NOTSUP;
    if (of->passive || of->inspector == NULL) {
        base.set_errbuf(of->module, "towpath: no engine, or a passive instance");
        return DAQ_ERROR_NODEV;
    }
    if (packet->ingress_group < 0) {
        base.set_errbuf(of->module, "towpath: ingress_group has to be the port's number, as in a received packet");
        return DAQ_ERROR_NODEV;
    }
    near.port = (uint32_t)packet->ingress_group;
    near.link_type = of->raw ? LINKTYPE_RAW : LINKTYPE_ETHERNET;
    return send_packet(of, &near, TOWPATH_INJECT_FORWARD, NULL, 0, data, len);
}

static int inject_relative(void *handle, DAQ_Msg_h message, const uint8_t *data, uint32_t len, int reverse)
{
    struct instance *of = handle;
    const struct buffer *buffer = message->priv;
    if (of->passive || of->inspector == NULL || buffer->attachment != of->attachment || !buffer->lent) {
        base.set_errbuf(of->module, "towpath: the engine of this message is gone, or the instance is passive");
        return DAQ_ERROR_NODEV;
    }
    return send_packet(of, &buffer->frame, reverse ? TOWPATH_INJECT_BACK : TOWPATH_INJECT_FORWARD, buffer->frame.payload,
                       of->raw ? buffer->frame.network : 0, data, len);
}

static int ioctl_(void *handle, DAQ_IoctlCmd command, void *argument, size_t length)
{
    (void)handle;
    if (command == DIOCTL_GET_DEVICE_INDEX) {
        DIOCTL_QueryDeviceIndex *query = argument;
        if (length != sizeof *query || query->device == NULL)
            return DAQ_ERROR_INVAL;
        unsigned index = if_nametoindex(query->device);
        if (index == 0)
            return DAQ_ERROR_NODEV;
        query->index = (int)index;
        return DAQ_SUCCESS;
    }
    return DAQ_ERROR_NOTSUP;
}

static int get_stats(void *handle, DAQ_Stats_t *stats)
{
    const struct instance *of = handle;
    *stats = of->stats;
    stats->hw_packets_dropped = of->lost;
    stats->hw_packets_received = of->stats.packets_received + of->lost;
    stats->packets_outstanding = of->pool.size - of->pool.available;
    return DAQ_SUCCESS;
}

static void reset_stats(void *handle)
{
    struct instance *of = handle;
    memset(&of->stats, 0, sizeof of->stats);
    of->lost = 0;
}

static int get_snaplen(void *handle)
{
    const struct instance *of = handle;
    return (int)of->snaplen;
}

static uint32_t get_capabilities(void *handle)
{
    const struct instance *of = handle;
    uint32_t capabilities = DAQ_CAPA_UNPRIV_START | DAQ_CAPA_INTERRUPT | DAQ_CAPA_DEVICE_INDEX | (of->raw ? DAQ_CAPA_INJECT_RAW : 0);
    if (of->passive)
        return capabilities & ~DAQ_CAPA_INJECT_RAW;
    return capabilities | DAQ_CAPA_BLOCK | DAQ_CAPA_REPLACE | DAQ_CAPA_INJECT | DAQ_CAPA_WHITELIST | DAQ_CAPA_BLACKLIST;
}

static int get_datalink_type(void *handle)
{
    const struct instance *of = handle;
    return of->raw ? DLT_RAW_IP : DLT_ETHERNET;
}

static int get_msg_pool_info(void *handle, DAQ_MsgPoolInfo_t *info)
{
    const struct instance *of = handle;
    *info = of->pool;
    return DAQ_SUCCESS;
}

/* The functions that are missing are not supported: the queue's rules select packets, and the engine's configuration is reloaded there. */
__attribute__((visibility("default"))) const DAQ_ModuleAPI_t DAQ_MODULE_DATA = {
    .api_version = DAQ_MODULE_API_VERSION,
    .api_size = sizeof(DAQ_ModuleAPI_t),
    .module_version = MODULE_VERSION,
    .name = "towpath",
    .type = DAQ_TYPE_INTF_CAPABLE | DAQ_TYPE_INLINE_CAPABLE | DAQ_TYPE_MULTI_INSTANCE,
    .load = load,
    .unload = unload,
    .get_variable_descs = get_variable_descs,
    .instantiate = instantiate,
    .destroy = destroy,
    .start = start,
    .inject = inject,
    .inject_relative = inject_relative,
    .interrupt = interrupt,
    .stop = stop,
    .ioctl = ioctl_,
    .get_stats = get_stats,
    .reset_stats = reset_stats,
    .get_snaplen = get_snaplen,
    .get_capabilities = get_capabilities,
    .get_datalink_type = get_datalink_type,
    .msg_receive = msg_receive,
    .msg_finalize = msg_finalize,
    .get_msg_pool_info = get_msg_pool_info,
};

/* A host of modules of libdaq 3, for tests: loads a module, gives verdicts, and prints one line of counts.
 *
 * host MODULE INPUT ACT COUNT [KEY=VALUE...]: receives until COUNT packets have a verdict and no packet came for half a second. ACT is the name
 * of a verdict, or an action below. Keys: mode=passive, snaplen, pool, and the variables of the module. */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <daq_module_api.h>

struct test_config {
    const char *input;
    DAQ_Mode mode;
    int snaplen;
    unsigned pool;
    const char *keys[8], *values[8];
    unsigned variables, at;
};
struct test_instance {
    char error[256];
};

static const DAQ_ModuleAPI_t *module;
static struct test_instance instance;
static void *handle;

static const char *get_input(DAQ_ModuleConfig_h config) { return config->input; }
static int get_snaplen(DAQ_ModuleConfig_h config) { return config->snaplen; }
static unsigned get_timeout(DAQ_ModuleConfig_h config) { return config->input ? 500 : 0; }
static unsigned get_pool(DAQ_ModuleConfig_h config) { return config->pool; }
static unsigned get_one(DAQ_ModuleConfig_h config) { return config != NULL; }
static DAQ_Mode get_mode(DAQ_ModuleConfig_h config) { return config->mode; }

static int next_variable(DAQ_ModuleConfig_h config, const char **key, const char **value)
{
    bool more = config->at < config->variables;
    *key = more ? config->keys[config->at] : NULL;
    *value = more ? config->values[config->at++] : NULL;
    return DAQ_SUCCESS;
}

static int first_variable(DAQ_ModuleConfig_h config, const char **key, const char **value)
{
    config->at = 0;
    return next_variable(config, key, value);
}

static void set_error(DAQ_ModuleInstance_h of, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(of->error, sizeof of->error, format, arguments);
    va_end(arguments);
}

static const DAQ_BaseAPI_t base = {
    .api_version = DAQ_BASE_API_VERSION,
    .api_size = sizeof base,
    .config_get_input = get_input,
    .config_get_snaplen = get_snaplen,
    .config_get_timeout = get_timeout,
    .config_get_msg_pool_size = get_pool,
    .config_get_total_instances = get_one,
    .config_get_instance_id = get_one,
    .config_get_mode = get_mode,
    .config_first_variable = first_variable,
    .config_next_variable = next_variable,
    .set_errbuf = set_error,
};

static void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, instance.error);
    exit(1);
}

static void expect(bool fits, const char *what)
{
    if (!fits)
        fail(what);
}

static void on_signal(int number) { expect(number == SIGALRM && module->interrupt(handle) == DAQ_SUCCESS, "interrupt"); }

static void *interrupter(void *delay)
{
    usleep(*(unsigned *)delay);
    module->interrupt(handle);
    return NULL;
}

/* A wait without packets ends with its timeout, with interrupt of another thread, and with interrupt of a signal handler. An interrupt before
 * the call ends it, too; each ends one call. */
static void interrupts(void)
{
    const DAQ_Msg_t *message;
    DAQ_RecvStatus status;
    unsigned delay = 50000;
    pthread_t thread;
    expect(module->msg_receive(handle, 1, &message, &status) == 0 && status == DAQ_RSTAT_TIMEOUT, "timeout");
    pthread_create(&thread, NULL, interrupter, &delay);
    expect(module->msg_receive(handle, 1, &message, &status) == 0 && status == DAQ_RSTAT_INTERRUPTED, "interrupt of a thread");
    pthread_join(thread, NULL);
    signal(SIGALRM, on_signal);
    ualarm(50000, 0);
    expect(module->msg_receive(handle, 1, &message, &status) == 0 && status == DAQ_RSTAT_INTERRUPTED, "interrupt of a signal");
    module->interrupt(handle);
    expect(module->msg_receive(handle, 1, &message, &status) == 0 && status == DAQ_RSTAT_INTERRUPTED, "interrupt before the call");
    expect(module->msg_receive(handle, 1, &message, &status) == 0 && status == DAQ_RSTAT_TIMEOUT, "timeout after an interrupt");
}

/* The UDP packet in the message, with its ends exchanged if `answers`, and another last byte. Returns its length. */
static uint32_t forge(const DAQ_Msg_t *message, uint8_t *bytes, bool answers, uint8_t last)
{
    unsigned ip = module->get_datalink_type(handle) == 1 ? 14 : 0;
    memcpy(bytes, message->data, message->data_len);
    if (answers) {
        const uint8_t *data = message->data;
        if (ip) {
            memcpy(bytes, data + 6, 6);
            memcpy(bytes + 6, data, 6);
        }
        memcpy(bytes + ip + 12, data + ip + 16, 4);
        memcpy(bytes + ip + 16, data + ip + 12, 4);
        memcpy(bytes + ip + 20, data + ip + 22, 2);
        memcpy(bytes + ip + 22, data + ip + 20, 2);
    }
    bytes[message->data_len - 1] = last;
    return message->data_len;
}

static DAQ_Verdict act(const char *name, const DAQ_Msg_t *message, unsigned number)
{
    static const char *const names[MAX_DAQ_VERDICT] = {"pass", "block", "replace", "whitelist", "blacklist", "ignore"};
    static uint8_t bytes[65536];
    const DAQ_PktHdr_t *header = message->hdr;
    uint32_t len;
    /* Each packet becomes an answer. */
    if (strcmp(name, "answer") == 0) {
        len = forge(message, bytes, true, 'a');
        expect(module->inject_relative(handle, message, bytes, len, 1) == DAQ_SUCCESS, "inject_relative, back");
        return DAQ_VERDICT_BLOCK;
    }
    /* Each packet is followed by two others. */
    if (strcmp(name, "follow") == 0) {
        len = forge(message, bytes, false, 'f');
        expect(module->inject_relative(handle, message, bytes, len, 0) == DAQ_SUCCESS, "inject_relative, forward");
        bytes[len - 1] = 'g';
        expect(module->inject(handle, DAQ_MSG_TYPE_PACKET, header, bytes, len) == DAQ_SUCCESS, "inject");
        return DAQ_VERDICT_PASS;
    }
    if (strcmp(name, "refused") == 0) {
        expect(module->inject_relative(handle, message, message->data, message->data_len, 1) == DAQ_ERROR_NOTSUP, "inject_relative");
        expect(strstr(instance.error, "may-inject") != NULL, "its message");
        return DAQ_VERDICT_PASS;
    }
    if (strcmp(name, "mixed") == 0)
        return number % 2 ? DAQ_VERDICT_BLOCK : DAQ_VERDICT_PASS;
    for (unsigned verdict = 0; verdict < MAX_DAQ_VERDICT; verdict++) {
        if (strcmp(name, names[verdict]) == 0) {
            if (verdict == DAQ_VERDICT_REPLACE)
                message->data[message->data_len - 1] ^= 0x20;
            return verdict;
        }
    }
    fail(name);
    return DAQ_VERDICT_PASS;
}

int main(int count, char **words)
{
    enum { KEPT = 40 };
    struct test_config config = {.mode = DAQ_MODE_INLINE};
    const DAQ_Msg_t *messages[16], *kept[KEPT];
    unsigned wanted = count > 4 ? strtoul(words[4], NULL, 10) : 0, packets = 0, cut = 0, largest = 0, keeps = 0, indices = 0;
    bool keep = count > 3 && strcmp(words[3], "keep") == 0;
    DAQ_RecvStatus status;
    DAQ_Stats_t stats;
    DAQ_MsgPoolInfo_t pool;
    const DAQ_VariableDesc_t *descriptions;
    void *library;

    if (count < 5)
        return 2;
    config.input = words[2];
    for (int at = 5; at < count; at++) {
        char *value = strchr(words[at], '=');
        expect(value != NULL && config.variables < 8, words[at]);
        *value++ = '\0';
        if (strcmp(words[at], "mode") == 0)
            config.mode = strcmp(value, "passive") == 0 ? DAQ_MODE_PASSIVE : DAQ_MODE_READ_FILE;
        else if (strcmp(words[at], "snaplen") == 0)
            config.snaplen = (int)strtol(value, NULL, 10);
        else if (strcmp(words[at], "pool") == 0)
            config.pool = strtoul(value, NULL, 10);
        else
            config.keys[config.variables] = words[at], config.values[config.variables++] = value;
    }
    library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);
    module = library ? dlsym(library, "DAQ_MODULE_DATA") : NULL;
    if (module == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    expect(module->api_version == DAQ_MODULE_API_VERSION && module->api_size == sizeof *module, "the module's version");
    expect(strcmp(module->name, "towpath") == 0 && module->set_filter == NULL && module->config_load == NULL, "the module");
    expect(module->load(&base) == DAQ_SUCCESS, "load");
    expect(module->get_variable_descs(&descriptions) == 2 && strcmp(descriptions[0].name, "directory") == 0, "get_variable_descs");
    if (module->instantiate(&config, &instance, &handle) != DAQ_SUCCESS)
        fail("instantiate");
    if (module->start(handle) != DAQ_SUCCESS)
        fail("start");
    fprintf(stderr, "started\n");
    if (strcmp(words[3], "interrupts") == 0)
        interrupts();
    while (wanted > 0) {
        unsigned received = module->msg_receive(handle, 16, messages, &status);
        if (status == DAQ_RSTAT_ERROR)
            fail("msg_receive");
        if (status == DAQ_RSTAT_TIMEOUT && packets >= wanted)
            break;
        if (status == DAQ_RSTAT_NOBUF) {
            expect(keep && keeps == config.pool, "NOBUF");
            while (keeps > 0)
                expect(module->msg_finalize(handle, kept[--keeps], DAQ_VERDICT_PASS) == DAQ_SUCCESS, "msg_finalize of a kept packet");
        }
        largest = received > largest ? received : largest;
        for (unsigned at = 0; at < received; at++) {
            const DAQ_PktHdr_t *header = messages[at]->hdr;
            expect(messages[at]->type == DAQ_MSG_TYPE_PACKET && messages[at]->hdr_len == sizeof *header && messages[at]->owner == &instance, "a message");
            expect(header->ts.tv_sec > 0 && header->ingress_group >= 0 && header->pktlen >= messages[at]->data_len, "a packet's header");
            cut += header->pktlen > messages[at]->data_len;
            indices += header->ingress_index > 0 && header->egress_index > 0;
            packets++;
            if (keep && keeps < KEPT) {
                kept[keeps++] = messages[at];
                continue;
            }
            DAQ_Verdict verdict = act(words[3], messages[at], packets);
            expect(module->msg_finalize(handle, messages[at], verdict) == DAQ_SUCCESS, "msg_finalize");
            expect(module->msg_finalize(handle, messages[at], verdict) == DAQ_ERROR_INVAL, "a second verdict");
        }
    }
    while (keeps > 0)
        expect(module->msg_finalize(handle, kept[--keeps], DAQ_VERDICT_PASS) == DAQ_SUCCESS, "msg_finalize at the end");
    module->get_stats(handle, &stats);
    module->get_msg_pool_info(handle, &pool);
    expect(pool.available == pool.size && stats.packets_outstanding == 0, "the pool");
    DIOCTL_QueryDeviceIndex query = {.device = "lo"};
    expect(module->ioctl(handle, DIOCTL_GET_DEVICE_INDEX, &query, sizeof query) == DAQ_SUCCESS && query.index > 0, "the index of lo");
    expect(module->ioctl(handle, DIOCTL_GET_DEVICE_INDEX, &query, 1) == DAQ_ERROR_INVAL, "a short argument");
    expect(module->ioctl(handle, DIOCTL_SET_FLOW_OPAQUE, NULL, 0) == DAQ_ERROR_NOTSUP, "an unsupported command");
    fprintf(stderr, "packets=%u received=%llu filtered=%llu injected=%llu pass=%llu block=%llu replace=%llu flow=%llu cut=%u batch=%u capabilities=%x link=%d pool=%u indices=%u\n",
            packets, (unsigned long long)stats.packets_received, (unsigned long long)stats.packets_filtered,
            (unsigned long long)stats.packets_injected, (unsigned long long)stats.verdicts[DAQ_VERDICT_PASS],
            (unsigned long long)stats.verdicts[DAQ_VERDICT_BLOCK], (unsigned long long)stats.verdicts[DAQ_VERDICT_REPLACE],
            (unsigned long long)(stats.verdicts[DAQ_VERDICT_WHITELIST] + stats.verdicts[DAQ_VERDICT_BLACKLIST] + stats.verdicts[DAQ_VERDICT_IGNORE]),
            cut, largest, module->get_capabilities(handle), module->get_datalink_type(handle), pool.size, indices);
    module->reset_stats(handle);
    module->get_stats(handle, &stats);
    expect(stats.packets_received == 0 && stats.verdicts[DAQ_VERDICT_PASS] == 0, "reset_stats");
    expect(module->stop(handle) == DAQ_SUCCESS, "stop");
    module->destroy(handle);
    return module->unload();
}

/* The part of libdaq 3's binary interface that the module and its test use: names, values and layouts, in the project's own words. A module is
 * built with libdaq's own header; this one replaces it in tests, so that they need no libdaq. Functions get the handle that `instantiate`
 * returned. */
#ifndef TOWPATH_TEST_DAQ_MODULE_API_H
#define TOWPATH_TEST_DAQ_MODULE_API_H

#include <stddef.h>
#include <stdint.h>
#include <sys/time.h>

/* Results. */
enum {
    DAQ_SUCCESS = 0,
    DAQ_ERROR = -1,
    DAQ_ERROR_NOMEM = -2,
    DAQ_ERROR_NODEV = -3,
    DAQ_ERROR_NOTSUP = -4,
    DAQ_ERROR_INVAL = -7
};

typedef enum {
    DAQ_RSTAT_OK,
    DAQ_RSTAT_WOULD_BLOCK,
    DAQ_RSTAT_TIMEOUT,
    DAQ_RSTAT_EOF,
    DAQ_RSTAT_INTERRUPTED,
    DAQ_RSTAT_NOBUF,
    DAQ_RSTAT_ERROR
} DAQ_RecvStatus;

typedef enum { DAQ_MSG_TYPE_PACKET = 1, DAQ_MSG_TYPE_PAYLOAD = 2 } DAQ_MsgType;
typedef enum { DAQ_MODE_NONE, DAQ_MODE_PASSIVE, DAQ_MODE_INLINE, DAQ_MODE_READ_FILE } DAQ_Mode;
typedef enum {
    DAQ_VERDICT_PASS,
    DAQ_VERDICT_BLOCK,
    DAQ_VERDICT_REPLACE,
    DAQ_VERDICT_WHITELIST,
    DAQ_VERDICT_BLACKLIST,
    DAQ_VERDICT_IGNORE,
    MAX_DAQ_VERDICT
} DAQ_Verdict;

/* Types and capabilities of modules, and flags of packets and variables. */
enum { DAQ_TYPE_INTF_CAPABLE = 2, DAQ_TYPE_INLINE_CAPABLE = 4, DAQ_TYPE_MULTI_INSTANCE = 8 };
enum {
    DAQ_CAPA_BLOCK = 1,
    DAQ_CAPA_REPLACE = 2,
    DAQ_CAPA_INJECT = 4,
    DAQ_CAPA_WHITELIST = 8,
    DAQ_CAPA_BLACKLIST = 0x10,
    DAQ_CAPA_UNPRIV_START = 0x20,
    DAQ_CAPA_INTERRUPT = 0x40,
    DAQ_CAPA_DEVICE_INDEX = 0x100,
    DAQ_CAPA_INJECT_RAW = 0x200
};
enum { DAQ_PKT_FLAG_OPAQUE_IS_VALID = 1, DAQ_PKT_FLAG_NOT_FORWARDING = 2, DAQ_PKT_FLAG_FLOWID_IS_VALID = 0x10 };
enum { DAQ_VAR_DESC_REQUIRES_ARGUMENT = 1 };
enum { DAQ_PKTHDR_UNKNOWN = -1 };

typedef struct test_config *DAQ_ModuleConfig_h;
typedef struct test_instance *DAQ_ModuleInstance_h;

/* A message, and the header of one that is a packet. */
typedef struct {
    void *hdr;
    uint8_t *data;
    void *meta[8];
    DAQ_ModuleInstance_h owner;
    void *priv;
    size_t hdr_len;
    DAQ_MsgType type;
    uint32_t data_len;
} DAQ_Msg_t;
typedef const DAQ_Msg_t *DAQ_Msg_h;

typedef struct {
    struct timeval ts;
    uint32_t pktlen;
    int32_t ingress_index, egress_index;
    int16_t ingress_group, egress_group;
    uint32_t opaque, flow_id, flags, address_space_id, tenant_id;
} DAQ_PktHdr_t;

typedef struct {
    uint64_t hw_packets_received, hw_packets_dropped;
    uint64_t packets_received, packets_filtered, packets_injected, packets_outstanding;
    uint64_t verdicts[MAX_DAQ_VERDICT];
} DAQ_Stats_t;

typedef struct {
    uint32_t size, available;
    size_t mem_size;
} DAQ_MsgPoolInfo_t;

typedef struct {
    const char *name, *description;
    uint32_t flags;
} DAQ_VariableDesc_t;

typedef enum { DIOCTL_GET_DEVICE_INDEX = 1, DIOCTL_SET_FLOW_OPAQUE = 2 } DAQ_IoctlCmd;
typedef struct {
    const char *device;
    int index;
} DIOCTL_QueryDeviceIndex;

/* What the host offers to a module. Its version and size have to be these. */
#define DAQ_BASE_API_VERSION 0x00030002
typedef struct {
    uint32_t api_version, api_size;
    const char *(*config_get_input)(DAQ_ModuleConfig_h);
    int (*config_get_snaplen)(DAQ_ModuleConfig_h);
    unsigned (*config_get_timeout)(DAQ_ModuleConfig_h);
    unsigned (*config_get_msg_pool_size)(DAQ_ModuleConfig_h);
    unsigned (*config_get_total_instances)(DAQ_ModuleConfig_h);
    unsigned (*config_get_instance_id)(DAQ_ModuleConfig_h);
    DAQ_Mode (*config_get_mode)(DAQ_ModuleConfig_h);
    const char *(*config_get_variable)(DAQ_ModuleConfig_h, const char *);
    int (*config_first_variable)(DAQ_ModuleConfig_h, const char **, const char **);
    int (*config_next_variable)(DAQ_ModuleConfig_h, const char **, const char **);
    int (*resolve_subapi)(DAQ_ModuleInstance_h, void *);
    void (*set_errbuf)(DAQ_ModuleInstance_h, const char *, ...) __attribute__((format(printf, 2, 3)));
} DAQ_BaseAPI_t;

/* What a module exports as DAQ_MODULE_DATA. A function that it does not support is NULL. */
#define DAQ_MODULE_API_VERSION 0x00030001
typedef struct {
    uint32_t api_version, api_size, module_version;
    const char *name;
    uint32_t type;
    int (*load)(const DAQ_BaseAPI_t *);
    int (*unload)(void);
    int (*get_variable_descs)(const DAQ_VariableDesc_t **);
    int (*instantiate)(const DAQ_ModuleConfig_h, DAQ_ModuleInstance_h, void **);
    void (*destroy)(void *);
    int (*set_filter)(void *, const char *);
    int (*start)(void *);
    int (*inject)(void *, DAQ_MsgType, const void *, const uint8_t *, uint32_t);
    int (*inject_relative)(void *, DAQ_Msg_h, const uint8_t *, uint32_t, int);
    int (*interrupt)(void *);
    int (*stop)(void *);
    int (*ioctl)(void *, DAQ_IoctlCmd, void *, size_t);
    int (*get_stats)(void *, DAQ_Stats_t *);
    void (*reset_stats)(void *);
    int (*get_snaplen)(void *);
    uint32_t (*get_capabilities)(void *);
    int (*get_datalink_type)(void *);
    int (*config_load)(void *, void **);
    int (*config_swap)(void *, void *, void **);
    int (*config_free)(void *, void *);
    unsigned (*msg_receive)(void *, const unsigned, const DAQ_Msg_t *[], DAQ_RecvStatus *);
    int (*msg_finalize)(void *, const DAQ_Msg_t *, DAQ_Verdict);
    int (*get_msg_pool_info)(void *, DAQ_MsgPoolInfo_t *);
} DAQ_ModuleAPI_t;

#endif

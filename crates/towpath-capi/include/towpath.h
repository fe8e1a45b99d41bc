/* towpath.h: the C API of Towpath: inspectors, workers, senders and the multiplexor. libtowpath 0.1; the guide is docs/book/src/reference/c.md.
 *
 * Results    A function returns 0 or a number that its comment explains, or on failure a negative errno(3) number; towpath_error()
 *            returns the message. -EINVAL: a NULL pointer, or a value that the comment does not allow. -ENOTRECOVERABLE: the
 *            library caught an internal error; close the handle.
 * Handles    attach and open create a handle, close destroys it (and accepts NULL). Only one thread at a time may use a handle;
 *            different handles are independent. After fork(2) only one of the processes may use a handle; for inspectors and
 *            workers this must be the process that attached, and their close ends them even if the other process has them open.
 * Pointers   are used during the call only, unless the comment says otherwise. A pointer with a length may be NULL if the length is
 *            0. Output memory need not be initialised; it is not written on failure.
 * Signals    If the comment lists -EINTR, a signal handler that runs during a wait ends the wait with it. No data is lost; call the
 *            function again. */
#ifndef TOWPATH_H
#define TOWPATH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TOWPATH_VERSION "0.1.0"

/* Version of the library; compare it with TOWPATH_VERSION. A static string. */
const char *towpath_version(void);

/* Message of the last failed call of this thread. "" if no call has failed, and in destructors of a thread that exits
 * (pthread_key_create(3)). Valid until the thread exits or another call of it fails. */
const char *towpath_error(void);

/* ---- Inspectors: receive packets from a rule's queue, return verdicts -------------------------------------------------------- */

typedef struct towpath_inspector towpath_inspector;

/* Identifies a frame or message to the library. Opaque; the library validates it. */
struct towpath_ticket {
    uint32_t lane, seq, at;
};

/* Kind of a frame: towpath_frame.kind. */
enum towpath_kind {
    TOWPATH_PACKET = 0,  /* a packet, starting with its link header */
    TOWPATH_MESSAGE = 1, /* a message */
    TOWPATH_EVENT = 2,   /* an event */
    TOWPATH_DUMP = 3,    /* part of a dump: towpath_inspector_request */
    TOWPATH_DONE = 4,    /* the end of a dump, or the answer to another request: queue has its group */
    TOWPATH_ERROR = 5,   /* a request was refused: queue has its group, mark the errno(3) */
    TOWPATH_GAP = 8      /* frames were lost: wire_len has their number, mark the reason (towpath_loss). Decide it like any frame. */
};

/* Reason of a loss. */
enum towpath_loss {
    TOWPATH_LOST_NO_ROOM = 1,     /* the inspector holds too many frames */
    TOWPATH_LOST_OLDEST = 2,      /* replaced by newer frames */
    TOWPATH_LOST_DROPPED = 3,     /* dropped uninspected: the queue fails closed */
    TOWPATH_LOST_PASSED = 4,      /* passed uninspected: the queue fails open */
    TOWPATH_LOST_HANDED_ON = 5,   /* sent to another queue */
    TOWPATH_LOST_TOO_LARGE = 6,   /* larger than the maximum frame */
    TOWPATH_LOST_OVERWRITTEN = 7, /* events of states that the engine missed: it was busier than its journal is long */
    TOWPATH_LOST_LIMITED = 8      /* a copy (tee, fan-out mirror) beyond the engine's budget of copies */
};

struct towpath_frame {
    /* The bytes, in the ring's memory, which is mapped read-only. Valid until the frame is decided or the inspector
     * is closed. */
    const uint8_t *payload;
    size_t len;
    uint64_t time;     /* nanoseconds since the epoch */
    uint32_t wire_len; /* length of the packet on the wire; len is smaller if it was truncated */
    uint32_t kind;     /* enum towpath_kind; later versions may add kinds */
    uint32_t queue;
    uint32_t mark;
    uint32_t port;          /* the port that received it */
    uint32_t hash;          /* flow hash; the same in both directions */
    uint32_t pid, uid, gid; /* of the process that sent a message or an event; 0 for a packet */
    uint32_t lost;          /* frames lost before this one; 65535 means that many or more */
    uint32_t ingress;       /* index of the system's interface that received the packet; 0: none */
    uint32_t egress;        /* index of the interface by which it leaves; 0: none, or not known yet */
    uint16_t link_type;     /* as in pcap files */
    uint16_t network;       /* offset of the data after the link header, such as the IP header */
    uint16_t data;          /* offset of the upper layer's payload; len without one */
    uint8_t hook;           /* netfilter hook that corresponds to the packet's place in the engine: NF_INET_ of linux/netfilter.h */
    uint8_t bridged;        /* 1: both interfaces are ports of a bridge */
    struct towpath_ticket ticket;
};

/* Verdict on a frame. Every verdict except TOWPATH_HOLD returns the frame to the engine. */
enum towpath_verdict {
    TOWPATH_PASS = 1,   /* pass it */
    TOWPATH_DROP = 2,   /* drop it */
    TOWPATH_REJECT = 3, /* drop it and notify the sender (TCP reset or ICMP unreachable) */
    TOWPATH_QUEUE = 5,  /* send it to another queue: TOWPATH_QUEUE_NR */
    TOWPATH_REPEAT = 6, /* evaluate the rules again */
    TOWPATH_HOLD = 7    /* hold it: it is decided later, in any order, without delaying other frames */
};
/* Sends the frame to queue n, 0 to 65535. */
#define TOWPATH_QUEUE_NR(n) ((uint32_t)TOWPATH_QUEUE | (uint32_t)(n) << 16)
/* Flag of a verdict: applies it to the rest of the flow, too. */
#define TOWPATH_FLOW 0x100u

/* Flags of towpath_inspector_attach. */
#define TOWPATH_NO_GAPS 1u /* do not deliver frames of kind TOWPATH_GAP; towpath_frame.lost still counts */

/* Kind of a metric. */
enum towpath_metric_kind {
    TOWPATH_COUNTER = 0, /* counts events; never decreases */
    TOWPATH_GAUGE = 1    /* a current value */
};

/* A counter or gauge. The functions towpath_*_metrics write all metrics of a handle by name; a later version may have more. Texts end with
 * a NUL byte. */
struct towpath_metric {
    char group[32];    /* table: "consumer", "send", "mux", "mux_connection" (sum over connections), "mux_accept" */
    char name[32];     /* name in the table */
    char unit[16];     /* "packets", "bytes", "frames", "messages", "connections", "states", "seconds"; "" for events */
    char help[240];    /* one or two sentences */
    uint64_t value;    /* the value; nanoseconds where the unit is seconds */
    uint32_t kind;     /* enum towpath_metric_kind */
    uint32_t reserved; /* 0 */
};

struct towpath_ring_stats {
    uint64_t received; /* frames received */
    uint64_t lost;     /* frames lost */
    uint64_t sleeps;   /* waits that slept */
    uint64_t wakeups;  /* wake-ups sent to the engine */
    uint64_t oneshots; /* messages larger than the ring, sent in separate memory */
};

/* Attaches to the engine's socket at path. With NULL, uses the socket that TOWPATH_SOCKET names, which the engine sets for programs that
 * it starts. name is shown to administrators, 32 bytes at most; NULL: the program's name. flags: TOWPATH_NO_GAPS.
 * -EDESTADDRREQ: TOWPATH_SOCKET is not set; -EPERM: the engine rejects this user; -EPROTONOSUPPORT: the versions of engine and library
 * differ; -ENOBUFS: a limit of the engine is reached; -EPROTO: the socket is not an engine's; errors of connect(2). */
int towpath_inspector_attach(const char *path, const char *name, unsigned flags, towpath_inspector **inspector);

/* Closes the inspector. Undecided frames get the queue's default verdict. */
void towpath_inspector_close(towpath_inspector *inspector);

/* Receives the next frame. timeout in milliseconds: -1 waits forever, 0 does not wait. Returns 1 with a frame; 0 if the engine has ended the
 * channel and all frames were received. -EAGAIN: no frame within the timeout; -EINTR; -EPROTO: the ring's contents are invalid. */
int towpath_inspector_recv(towpath_inspector *inspector, struct towpath_frame *frame, int timeout);

/* Receives up to max frames into an array; waits for the first one like towpath_inspector_recv. Returns the number of frames, or as above.
 * Optimised for throughput: with timeout -1, after a batch of several frames, the next call may wait some microseconds for more frames. */
int towpath_inspector_recv_batch(towpath_inspector *inspector, struct towpath_frame *frames, size_t max, int timeout);

/* Decides a frame: enum towpath_verdict or TOWPATH_QUEUE_NR(n), optionally with TOWPATH_FLOW. A running engine sees the verdict at once; a
 * sleeping one is woken by the next call that receives, or by flush. -ESTALE: the frame was already decided (no effect). */
int towpath_inspector_verdict(towpath_inspector *inspector, const struct towpath_frame *frame, uint32_t verdict);

/* Like towpath_inspector_verdict, and replaces the bits of the packet's mark selected by mask with those of mark. */
int towpath_inspector_verdict_mark(towpath_inspector *inspector, const struct towpath_frame *frame, uint32_t verdict,
                                   uint32_t mark, uint32_t mask);

/* Decides all frames up to this one on the same lane (one per engine thread) that are neither decided nor held, in one write. Not
 * TOWPATH_HOLD. */
int towpath_inspector_verdict_upto(towpath_inspector *inspector, const struct towpath_frame *frame, uint32_t verdict);

/* Decides all frames received so far that are neither decided nor held. Not TOWPATH_HOLD. */
int towpath_inspector_verdict_all(towpath_inspector *inspector, uint32_t verdict);

/* Passes the frame with a different payload, which is copied. Waits while the ring to the engine is full. -EMSGSIZE: larger than the
 * engine accepts; -EPIPE: the engine has disconnected; -EINTR; -ESTALE. On failure the frame remains undecided. */
int towpath_inspector_replace(towpath_inspector *inspector, const struct towpath_frame *frame, const void *payload,
                              size_t len);

/* Way of an injected packet. */
enum towpath_inject {
    TOWPATH_INJECT_FORWARD = 0, /* as if it had come in by the frame's port and the inspector had passed it: by the other port of a bridge, or
                                 * as routed, after rules for the direction out; after packets of its flow that wait */
    TOWPATH_INJECT_BACK = 1     /* out by the frame's port, at once */
};

/* Sends a packet of the inspector's own. It begins with the link header of the frame's port; the engine corrects its checksums. Of the frame,
 * which may be decided, port, link_type and ticket.lane are used; without a frame, set these and 0 for the rest. Waits while the ring is full.
 * The packet leaves when the engine has read it: a sleeping one is woken by the next call that receives, or by flush. Packets that the engine
 * cannot send are dropped; the engine's metrics count them as not_injected. -EPERM: the queue lacks `may-inject = true`; -EMSGSIZE;
 * -EPIPE; -EINTR. */
int towpath_inspector_inject(towpath_inspector *inspector, const struct towpath_frame *frame, uint32_t way, const void *packet, size_t len);

/* Groups of the ring next to the engine's control socket (CONTROL.ring), for towpath_inspector_request. */
#define TOWPATH_GROUP_STATES 1u  /* a dump of the states: frames of TOWPATH_DUMP, then TOWPATH_DONE */
#define TOWPATH_GROUP_EVENTS 2u  /* changes of states: TOWPATH_DONE, then a frame of TOWPATH_EVENT for each change */
#define TOWPATH_GROUP_PACKETS 3u /* packets of rules with `log`: TOWPATH_DONE, then a frame of TOWPATH_PACKET for each packet */

/* Sends a request to the ring next to a control socket, to which the inspector is attached. payload: JSON, or NULL with len 0 for the defaults.
 * The answer is frames whose queue is the group. Return each frame with TOWPATH_PASS. Waits while the ring to the engine is full. */
int towpath_inspector_request(towpath_inspector *inspector, uint32_t group, const void *payload, size_t len);

/* Wakes the engine if it sleeps and verdicts are pending. */
int towpath_inspector_flush(towpath_inspector *inspector);

/* For event loops. fd returns a descriptor to poll for reading, valid until close; use it for polling only. Call arm before each poll: 1: poll
 * now; 0: a frame or the end is pending, receive first. After each poll call disarm, then receive with timeout 0 until -EAGAIN. */
int towpath_inspector_fd(const towpath_inspector *inspector);
int towpath_inspector_arm(towpath_inspector *inspector);
int towpath_inspector_disarm(towpath_inspector *inspector);

/* Reads the inspector's statistics. */
int towpath_inspector_stats(const towpath_inspector *inspector, struct towpath_ring_stats *stats);

/* Writes the first max metrics (1 or more). Returns the number of all metrics, which may exceed max. */
int towpath_inspector_metrics(const towpath_inspector *inspector, struct towpath_metric *metrics, size_t max);

/* ---- Workers: receive messages of a mux's connections, send answers (towpath mux) ---------------------------------------- */

typedef struct towpath_worker towpath_worker;

/* Identifies a connection of the mux; never reused for another connection. */
struct towpath_connection {
    uint32_t index, generation;
};

struct towpath_message {
    /* All bytes of the message, in the ring's memory, which is mapped read-only. Valid until the message is done or the
     * worker is closed; in towpath_worker_serve, during the call. */
    const uint8_t *bytes;
    size_t len;
    /* The message without a header or delimiter that the framing strips. */
    const uint8_t *payload;
    size_t payload_len;
    uint64_t time; /* nanoseconds since the epoch */
    struct towpath_connection connection;
    uint32_t mark, hash; /* set by the framing; 0 without */
    /* A worker attached with TOWPATH_PARTS gets long messages in parts. All parts of a message come to this worker, in order; parts of messages
     * of other connections may come between them. The next ones come when this one is done. Then no other worker ever gets the message.
     * An answer to any part answers the message. */
    uint32_t part; /* number of this part, from 1; 0: a whole message */
    uint16_t more; /* 1: another part follows */
    uint16_t cut;  /* 1: the connection ended before the last part; none follows. Without bytes */
    struct towpath_ticket ticket;
};

/* Attaches to the mux's socket; see towpath_inspector_attach. */
int towpath_worker_attach(const char *path, const char *name, towpath_worker **worker);

/* Closes the worker. Messages that are neither done nor answered go to another worker. */
void towpath_worker_close(towpath_worker *worker);

/* Receives the next message; see towpath_inspector_recv. Returns 0 if the mux has ended the channel. */
int towpath_worker_recv(towpath_worker *worker, struct towpath_message *message, int timeout);

/* Answers the message on its connection; the bytes are copied. Waits while the ring is full. A message has one answer: the mux detaches a
 * worker that answers again, unless it runs with --worker-may push. An answered message is not given to another worker if this one dies.
 * -EMSGSIZE: larger than the mux accepts; -EPIPE: the mux has disconnected; -EINTR; -ESTALE: the message is already done. */
int towpath_worker_reply(towpath_worker *worker, const struct towpath_message *message, const void *bytes, size_t len);

/* Sends a part of the answer, like towpath_worker_reply, which sends the last part; that one may be empty. */
int towpath_worker_reply_part(towpath_worker *worker, const struct towpath_message *message, const void *bytes, size_t len);

/* A message of towpath_worker_send that was not sent. */
struct towpath_unsent {
    struct towpath_connection connection; /* destination; generation 0: any connection */
    const uint8_t *bytes;                 /* the message; valid until the next towpath_worker_poll_unsent or close */
    size_t len;
    int32_t error;                        /* EPIPE: the connection ended; ENOTCONN: none was open; EAGAIN: the queues of all were full */
    uint32_t reserved;                    /* 0 */
};

/* Writes the oldest message that came back unsent. Returns 1, or 0 if there is none. They arrive with received messages; up to 1,024
 * messages and 4 MiB are kept. Never waits. */
int towpath_worker_poll_unsent(towpath_worker *worker, struct towpath_unsent *unsent);

/* Completes the message and returns its memory to the mux. -ESTALE: it is already done (no effect). */
int towpath_worker_done(towpath_worker *worker, const struct towpath_message *message);

/* Sends a message on a connection, like reply; no effect if the connection has ended. NULL (connected mode only): on the connection with the
 * least data to send. The mux detaches a worker that sends on a connection that it received no message from, or without a connection in
 * connected mode, unless it runs with --worker-may push. */
int towpath_worker_send(towpath_worker *worker, const struct towpath_connection *connection, const void *bytes, size_t len);

/* Flags of towpath_worker_attach_with. */
#define TOWPATH_EVENTS 1u /* receive opened and ended connections with towpath_worker_recv_event */
#define TOWPATH_PARTS 2u  /* receive long messages in parts (towpath_message.more); required by a framing with body=stream */

/* Kind of an event: towpath_worker_event.kind. */
enum towpath_worker_event_kind {
    TOWPATH_ON_MESSAGE = 1, /* a message */
    TOWPATH_ON_OPENED = 12, /* a connection was opened. One worker gets it, before the connection's messages. The worker may answer it
                             * (towpath_worker_reply) and send to the connection; it must complete it (towpath_worker_done). */
    TOWPATH_ON_ENDED = 13   /* a connection ended, and all of its messages are done. Each worker that got it or a message of it is told. */
};

/* How a connection ended: towpath_worker_event.cause; later versions may add causes. */
enum towpath_cause {
    TOWPATH_END_CLEAN = 0, /* closed by the peer after a whole message */
    TOWPATH_END_INSIDE = 1, /* closed by the peer inside a message: bytes, length */
    TOWPATH_END_RESET = 2, /* a read or write failed, or the peer reset it: error */
    TOWPATH_END_TLS = 3, /* TLS failed */
    TOWPATH_END_MALFORMED = 4, /* the framing refused the bytes */
    TOWPATH_END_TOO_BIG = 5, /* a message or its header was too big */
    TOWPATH_END_TIMEOUT = 6, /* a message was not complete in time */
    TOWPATH_END_GIVEN_BACK = 7, /* the framing gave it back */
    TOWPATH_END_UNATTACHED = 8, /* the application took it back */
    TOWPATH_END_DRAINED = 9, /* drained */
    TOWPATH_END_DRAIN_TIMEOUT = 10, /* not drained in time */
    TOWPATH_END_DESCRIPTORS = 11, /* the peer passed descriptors */
    TOWPATH_END_IDLE = 12, /* idle for too long */
    TOWPATH_END_SEND_TIMEOUT = 13, /* the peer accepted no data for too long */
    TOWPATH_END_SEND_FULL = 14, /* more to send than may wait for a peer */
    TOWPATH_END_MEMORY = 15, /* the mux was full */
    TOWPATH_END_CLOSED = 16, /* closed by a worker */
    TOWPATH_END_RESET_BY_WORKER = 17, /* reset by a worker */
    TOWPATH_END_WORKER_ENDED = 18 /* its worker ended */
};

/* An event. Texts end with a NUL byte and are cut if too long; an address is IP:PORT, [IP]:PORT or unix:PATH, or "". */
struct towpath_worker_event {
    uint32_t kind;                  /* enum towpath_worker_event_kind; later versions may add kinds */
    uint16_t resumed;               /* opened: 1 if messages were received or sent before: another worker served the connection */
    uint8_t tls;                    /* opened: 1 if it has TLS */
    uint8_t starttls;               /* opened: 1 if TLS began with STARTTLS or SSLRequest; an SMTP client was greeted then */
    struct towpath_message message; /* the message. Opened: without bytes, for reply and done. Ended: connection and time only. */
    char peer[128];                 /* opened: the peer's address */
    char local[128];                /* opened: the own address */
    char listener[128];             /* opened: address of the listener that accepted it; "" for outbound connections */
    char server_name[256];          /* opened: server name that the client asked for (SNI); "" without */
    char protocol[256];             /* opened: agreed protocol (ALPN); "" without */
    char client_names[1024];        /* opened: DNS names and URIs, or else the common name, in the client's verified certificate,
                                       separated by newlines; names that do not fit are left out */
    uint32_t cause;                 /* ended: enum towpath_cause */
    int32_t error;                  /* ended: errno(3) number, positive; 0 without an error */
    uint64_t bytes, length;         /* ended inside a message: its bytes that had arrived, and its length (0: unknown) */
    char text[256];                 /* ended: the cause with details */
};

/* Like towpath_worker_attach. flags: TOWPATH_EVENTS, TOWPATH_PARTS. */
int towpath_worker_attach_with(const char *path, const char *name, unsigned flags, towpath_worker **worker);

/* Receives the next message or event; otherwise like towpath_worker_recv, which skips events. */
int towpath_worker_recv_event(towpath_worker *worker, struct towpath_worker_event *event, int timeout);

/* Closes the message's connection after its answer and everything that was sent before; later answers are dropped. Waits while the ring is
 * full. Fails like towpath_worker_reply. */
int towpath_worker_close_after(towpath_worker *worker, const struct towpath_message *message);

/* Closes a connection like towpath_worker_close_after, or resets it at once. The mux detaches a worker that names a connection to which it may
 * not send (towpath_worker_send). */
int towpath_worker_close_connection(towpath_worker *worker, const struct towpath_connection *connection);
int towpath_worker_reset_connection(towpath_worker *worker, const struct towpath_connection *connection);

/* Collects the answer to a message in towpath_worker_serve. append copies bytes to its end. */
typedef struct towpath_reply towpath_reply;
int towpath_reply_append(towpath_reply *reply, const void *bytes, size_t len);

/* Closes the connection after this answer, or resets it. */
int towpath_reply_close(towpath_reply *reply);
int towpath_reply_reset(towpath_reply *reply);

/* Processes one message. Must not leave by longjmp or an exception, and must not use the worker. */
typedef void towpath_work(const struct towpath_message *message, towpath_reply *reply, void *context);

/* Processes messages until the mux ends the channel: recv, reply and done with less overhead per message. at_once: number of short messages of
 * one connection processed as a batch, 1 to 64 (docs/book/src/reference/mux.md describes the cost). Returns 0 at the end. -EINTR: call it
 * again; -EMSGSIZE: an answer was too long, and its message is done without one: call it again for the others; otherwise see recv and reply. */
int towpath_worker_serve(towpath_worker *worker, unsigned at_once, towpath_work *work, void *context);

/* See the functions of inspectors. */
int towpath_worker_flush(towpath_worker *worker);
int towpath_worker_fd(const towpath_worker *worker);
int towpath_worker_arm(towpath_worker *worker);
int towpath_worker_disarm(towpath_worker *worker);
int towpath_worker_stats(const towpath_worker *worker, struct towpath_ring_stats *stats);
int towpath_worker_metrics(const towpath_worker *worker, struct towpath_metric *metrics, size_t max);

/* ---- Senders: TCP and UDP transmission without copying (docs/book/src/reference/send.md) ---------------------------------- */

typedef struct towpath_sender towpath_sender;

/* Copy mode: towpath_sender_options.choice. */
enum towpath_choice {
    TOWPATH_ADAPTIVE = 0, /* zero copy where probes show that it works, plain sends otherwise */
    TOWPATH_ZEROCOPY = 1, /* zero copy for all calls above the minimum length */
    TOWPATH_PLAIN = 2     /* plain sends */
};

/* Options of a sender; 0 selects the default. */
struct towpath_sender_options {
    uint32_t choice;       /* enum towpath_choice */
    uint16_t segment;      /* UDP: size in bytes of the datagrams that each buffer is cut into (UDP_SEGMENT) */
    uint16_t tamper_check; /* 1: compares checksums at send and completion; reads every byte twice */
    uint32_t stall;        /* limit in milliseconds on the time without progress of the peer; 0: none */
    uint32_t max_buffers;  /* limit on buffers held */
    uint64_t max_pinned;   /* limit on pinned bytes */
};

struct towpath_sender_counters {
    uint64_t zerocopy_bytes; /* bytes sent with zero copy */
    uint64_t copied_bytes;   /* bytes sent with zero copy that the kernel copied */
    uint64_t plain_bytes;    /* bytes sent plain */
    uint64_t calls;          /* zero-copy calls */
    uint64_t completed;      /* zero-copy calls that have completed */
    uint64_t copied;         /* completed zero-copy calls that the kernel reported as copied */
    uint64_t no_buffers;     /* zero-copy calls that failed with ENOBUFS and were sent plain */
    uint64_t tampered;       /* buffers modified while on loan, with tamper_check */
};

/* Creates a sender for a connected TCP or UDP socket; options may be NULL. The descriptor is duplicated: the caller may close its own; the
 * socket closes with the last of both. No other code may send with MSG_ZEROCOPY on it or read its error queue. -ENOTSOCK; -EBADF;
 * -EOPNOTSUPP: TOWPATH_ZEROCOPY on a socket that does not support it. */
int towpath_sender_open(int fd, const struct towpath_sender_options *options, towpath_sender **sender);

/* Queues a buffer, to be sent together with later ones. The buffer is then on loan: do not write or free it until towpath_sender_reclaim
 * returns its id, or towpath_sender_close reports it. Never waits. -EAGAIN: max_buffers are on loan; call reclaim, or drain if there are
 * none; this buffer was not queued. -EMSGSIZE: a datagram exceeds the socket's limit; others can be sent. -EPIPE, -ECONNRESET and other
 * errors of send(2): the connection has ended, call close; the buffer may be on loan nevertheless. */
int towpath_sender_queue(towpath_sender *sender, uint64_t id, const void *bytes, size_t len);

/* Waits until the kernel has accepted all queued data; it may still read the buffers. -ETIMEDOUT: no progress of the peer for
 * options.stall; otherwise see queue. */
int towpath_sender_flush(towpath_sender *sender);

/* Writes the ids of up to max completed buffers, whose loan has ended. Returns their number. Never waits. */
int towpath_sender_reclaim(towpath_sender *sender, uint64_t *ids, size_t max);

/* Waits until all data is sent and completed, at most timeout milliseconds (-1: forever). Returns 1 if so, and all buffers can be
 * reclaimed; 0: timeout; otherwise see flush. */
int towpath_sender_drain(towpath_sender *sender, int timeout);

/* The socket, to poll for POLLERR, which reports completions. Valid until close. */
int towpath_sender_fd(const towpath_sender *sender);

/* Reads the sender's counters. */
int towpath_sender_counters(const towpath_sender *sender, struct towpath_sender_counters *counters);

/* Writes the first max metrics (1 or more). Returns the number of all metrics, which may exceed max. */
int towpath_sender_metrics(const towpath_sender *sender, struct towpath_metric *metrics, size_t max);

/* Ends the connection: sends queued data, shuts down the write side (shutdown(2)), waits for completions for at most timeout milliseconds
 * (0 and more; otherwise -EINVAL without effect), and frees the sender in any case. Returns 1 if all data was sent; all loans have ended.
 * Returns 0 if the connection was reset: the kernel may still read some buffers. Their ids, max at most, are written to ids and their
 * number to pinned; do not write or free these for a minute. The loans of all other buffers have ended. ids and pinned may be NULL. After
 * a failure all buffers on loan count as pinned. */
int towpath_sender_close(towpath_sender *sender, int timeout, uint64_t *ids, size_t max, size_t *pinned);

/* ---- Multiplexor in this process: handles with a socket's calls, like Linux's KCM (docs/book/src/reference/mux.md) ----------- */

/* A handle of a mux, like a KCM socket: a message of any connection goes to any handle that receives. Clone it for each thread. Signals do not
 * end waits. */
typedef struct towpath_mux towpath_mux;

/* Flag of towpath_mux_socket: all connections lead to equivalent peers, so a message may be sent on any of them. */
#define TOWPATH_CONNECTED 1u

/* Result of towpath_mux_recv. */
struct towpath_mux_message {
    size_t length;                        /* length of the message from the first byte of this read: of a datagram, its full length */
    size_t skip, trim;                    /* bytes that the framing strips at the start and the end; they are read, too */
    struct towpath_connection connection; /* its connection */
    uint32_t flags;                       /* MSG_TRUNC: the rest was dropped; MSG_EOR: these bytes end the message */
    uint32_t mark, hash;                  /* set by the framing; 0 without */
    uint32_t reserved;
};

/* Releases the context of a function, once, when the library no longer calls it. NULL: nothing to release. Must not use a mux. */
typedef void towpath_release(void *context);

/* A framing (docs/book/src/reference/framing.md). Muxes and connections that use it keep it when it is closed. parse: a preset or clauses.
 * toml: a TOML document. program: the bytes of a BPF object file, of raw eBPF instructions, or of the output of tcpdump -ddd
 * (docs/book/src/reference/bpf.md); name selects one of several programs of an object, or is NULL. -EINVAL: invalid, with the position
 * or the verifier's reason in the message. */
typedef struct towpath_framing towpath_framing;
int towpath_framing_parse(const char *text, towpath_framing **framing);
int towpath_framing_toml(const char *document, towpath_framing **framing);
int towpath_framing_program(const void *object, size_t len, const char *name, towpath_framing **framing);
void towpath_framing_close(towpath_framing *framing);

/* State of a towpath_framer. All but messages and cb are 0 before a call. */
struct towpath_framing_state {
    uint64_t messages; /* number of messages framed on the connection; not read after the call */
    size_t need;       /* with result 0: number of bytes, from the start of the message, needed to know more; 0: one more than now */
    size_t skip, trim; /* bytes at the start and at the end of the message that are not payload */
    uint32_t mark;     /* the message's mark */
    uint32_t hash;     /* the message's hash, for TOWPATH_ORDER_KEY; 0: none */
    uint32_t cb[5];    /* state of the connection: 0 at its start, kept from call to call */
    uint32_t reserved; /* 0 */
};

/* Frames the message that starts at bytes; len is at least 1, and other messages may follow. Returns the message's length (its end may not
 * have arrived); 0 if more bytes are needed, and is then called with the same bytes and more; or a negative errno(3) number, which ends
 * the connection (TOWPATH_END_MALFORMED; the number is the error of the event), -ESTRPIPE to give the connection back. With more bytes
 * after them, the result for the same bytes must stay the same. The mux bounds the bytes (head_max, message_max) but not the time: all
 * connections wait. Called by one thread of the mux at a time, below its lock: calls on a mux return -EDEADLK. Must not leave by longjmp
 * or an exception. */
typedef int64_t towpath_framer(const uint8_t *bytes, size_t len, struct towpath_framing_state *state, void *context);
int towpath_framing_function(towpath_framer *framer, void *context, towpath_release *release, towpath_framing **framing);

/* Creates a mux and its first handle. type: SOCK_DGRAM (each send is a message unless it has MSG_MORE; a read shorter than the message drops
 * the rest) or SOCK_SEQPACKET (a send with MSG_EOR ends a message; a read shorter than the message leaves the rest to the next read).
 * framing: a preset or description (docs/book/src/reference/framing.md). -EINVAL: the framing is invalid, with the position in the
 * message; -EPROTONOSUPPORT: the type. */
int towpath_mux_socket(int type, const char *framing, uint32_t flags, towpath_mux **mux);

/* Order of messages that several handles process (docs/book/src/reference/mux.md): towpath_mux_options.order. */
enum towpath_order {
    TOWPATH_ORDER_DEFAULT = 0, /* the order that the framing's protocol needs */
    TOWPATH_ORDER_NONE = 1,    /* each message goes to the first free handle */
    TOWPATH_ORDER_REPLIES = 2, /* answers leave in the order of their messages */
    TOWPATH_ORDER_SERIAL = 3,  /* one message of a connection at a time */
    TOWPATH_ORDER_STICKY = 4,  /* all messages of a connection go to the same handle */
    TOWPATH_ORDER_KEY = 5      /* one message with the same hash at a time; the framing needs key=OFFSET:LENGTH */
};

/* Options of a mux (docs/book/src/reference/mux.md, "Bounds"). 0 selects the default, which each comment names last. */

struct towpath_mux_options {
    uint64_t message_max;      /* length of a message; a longer one ends its connection; 16 MiB */
    uint64_t head_max;         /* bytes received before the length is known, for framings without such a bound; 64 KiB */
    uint64_t connection_bytes; /* bytes of a connection's unfinished messages above which it is not read; 1 MiB */
    uint64_t send_bytes;       /* bytes not accepted by its peer above which it is not read; 256 KiB */
    uint64_t send_most;        /* bytes not accepted by its peer above which it ends; 16 MiB, or twice message_max if set and larger */
    uint64_t mux_bytes;        /* total bytes above which no connection is read; 256 MiB */
    uint32_t head_time;        /* milliseconds from a message's first byte until its length is known (of a line: its end); unlimited */
    uint32_t body_time;        /* milliseconds from then until its last byte, in addition to the time from rate; unlimited */
    uint32_t rate;             /* bytes per second: a message gets length / rate in addition to body_time; no addition */
    uint32_t idle;             /* milliseconds without traffic and pending work after which a connection ends; unlimited */
    uint32_t send_time;        /* milliseconds without progress of a peer while data is sent; 60 s, UINT32_MAX: unlimited */
    uint32_t order;            /* enum towpath_order; that of the framing */
    uint32_t in_flight;        /* messages of one connection that handles hold at a time; all handles but one are busy with a connection
                                * while another one is active (docs/book/src/reference/mux.md, "Balance"), UINT32_MAX: unlimited */
    uint32_t rebalance;        /* TOWPATH_ORDER_STICKY: connections above the fewest of a handle from which they move; they never move */
};

/* Counters of a mux, over all its handles; received = done + undone + queued + in_hand. */
struct towpath_mux_counters {
    uint64_t connections;    /* connections attached at present */
    uint64_t attached;       /* connections attached in total */
    uint64_t ended;          /* connections ended for any reason; the errors are below */
    uint64_t received;       /* complete messages received */
    uint64_t received_bytes; /* bytes of complete messages received */
    uint64_t done;           /* messages read and done */
    uint64_t undone;         /* messages discarded */
    uint64_t queued;         /* messages that no handle has started to read */
    uint64_t in_hand;        /* messages that handles have and that are not done */
    uint64_t sent;           /* messages sent completely */
    uint64_t sent_bytes;     /* bytes sent */
    uint64_t unsent;         /* messages not sent completely because their connection ended */
    uint64_t bytes;          /* bytes that the mux holds */
    uint64_t resets;         /* connections reset, or with a failed read or write */
    uint64_t inside;         /* connections closed by their peer inside a message */
    uint64_t malformed;      /* connections with invalid data or an impossible length */
    uint64_t too_long;       /* connections with a message above message_max or head_max */
    uint64_t late;           /* connections with a message that exceeded head_time or body_time */
    uint64_t idle;           /* connections that were idle for too long */
    uint64_t send_timeouts;  /* connections whose peer made no progress for send_time */
    uint64_t send_full;      /* connections with more than send_most to send */
    uint64_t mux_full;       /* connections ended because they held most when mux_bytes was exceeded */
    uint64_t drain_timeouts; /* connections not drained in time */
};

/* Like towpath_mux_socket, with limits; options may be NULL. */
int towpath_mux_socket_with(int type, const char *framing, uint32_t flags, const struct towpath_mux_options *options,
                            towpath_mux **mux);

/* Like towpath_mux_socket_with, with a framing. */
int towpath_mux_socket_framed(int type, const towpath_framing *framing, uint32_t flags, const struct towpath_mux_options *options,
                              towpath_mux **mux);

/* Reads the counters of the mux. */
int towpath_mux_counters(const towpath_mux *mux, struct towpath_mux_counters *counters);

/* Writes the first max metrics (1 or more) of the mux. Returns the number of all metrics, which may exceed max. */
int towpath_mux_metrics(const towpath_mux *mux, struct towpath_metric *metrics, size_t max);

/* Creates another handle of the same mux and type. -ENOTCONN: the mux is draining. */
int towpath_mux_clone(const towpath_mux *mux, towpath_mux **clone);

/* Closes the handle. Messages that it has not read completely go to other handles. The last handle waits until all data is sent, at most
 * timeout milliseconds (0 and more; otherwise -EINVAL without effect). Returns 1 if all data is sent or other handles exist; 0: timeout. */
int towpath_mux_close(towpath_mux *mux, int timeout);

/* Listens at "HOST:PORT" and attaches incoming connections. Writes the port to port, which may be NULL. */
int towpath_mux_listen(const towpath_mux *mux, const char *address, uint16_t *port);

/* Options of TLS; NULL and 0 select the default. Set the whole struct to 0 first: a later version may have more. */
struct towpath_tls_options {
    const char *certificate; /* server: path of a PEM file with the certificate chain, own certificate first */
    const char *key;         /* server: path of a PEM file with its private key */
    const char *client_ca;   /* server: path of a PEM file with the authorities that sign certificates of clients; NULL: clients need none */
    const char *roots;       /* client: path of a PEM file with the certificates that sign servers */
    const char *name;        /* client: name in the server's certificate; the host of the peer's address */
    uint32_t handshake_time; /* milliseconds for the handshake; 10 s */
    uint32_t client_optional; /* server: 1: serve clients without a certificate, too */
    uint32_t starttls;        /* server: 1: begin in plaintext and require STARTTLS (smtp) or SSLRequest (postgres-frontend) */
    uint32_t reserved;        /* 0 */
};

/* As towpath_mux_listen, with TLS, or on a Unix stream socket at path. Connections with TLS are attached after their handshake. ALPN has the
 * protocols of the mux's framing. -EINVAL: a file of TLS, which the message names, is invalid, or the protocol of the framing has no
 * STARTTLS. */
int towpath_mux_listen_tls(const towpath_mux *mux, const char *address, const struct towpath_tls_options *options, uint16_t *port);
int towpath_mux_listen_unix(const towpath_mux *mux, const char *path);

/* Reads the certificates and keys of all listeners again, in the calling thread. Later handshakes use them; connections are not affected.
 * -EINVAL: a file, which the message names, is invalid; all listeners then keep what was read before. */
int towpath_mux_reload_tls(const towpath_mux *mux);

struct towpath_connect_options {
    const struct towpath_tls_options *tls; /* TLS, over TCP only; NULL: none */
    uint32_t timeout;                      /* milliseconds for connect(2) per address; 10 s */
    uint32_t pause;                        /* milliseconds before the second attempt, doubled for each further one; 100 ms */
    uint32_t pause_most;                   /* limit on that time in milliseconds; 30 s */
    uint32_t reserved;                     /* 0 */
};

/* Keeps a connection to peer, "HOST:PORT" or "unix:PATH": connects, attaches, and does so again when it ends, until the mux drains. Does not
 * wait. options may be NULL. connector may be NULL; its close stops the attempts and leaves the connection. */
typedef struct towpath_connector towpath_connector;
int towpath_mux_connect(const towpath_mux *mux, const char *peer, const struct towpath_connect_options *options,
                        towpath_connector **connector);
void towpath_connector_close(towpath_connector *connector);

/* Result of a towpath_admit. */
enum towpath_admission {
    TOWPATH_ADMIT_PASS = 0, /* attach the connection */
    TOWPATH_ADMIT_DENY = 1, /* close it */
    TOWPATH_ADMIT_RESET = 2 /* reset it */
};

/* Decides about each TCP connection that is accepted from now on, before a byte is read; without one, all are attached. left, which may be
 * NULL, is called once for each connection that passed, when it has left the mux. Addresses are IP:PORT or [IP]:PORT, valid during the
 * call. The functions are called by threads of the mux; connections wait meanwhile. They must not leave by longjmp or an exception. */
typedef int towpath_admit(const char *remote, const char *local, void *context);
typedef void towpath_left(const char *remote, const char *local, void *context);
int towpath_mux_set_admission(const towpath_mux *mux, towpath_admit *admit, towpath_left *left, void *context, towpath_release *release);

/* A connection of a mux that ended. Texts end with a NUL byte and are cut if too long. */
struct towpath_mux_ended {
    struct towpath_connection connection;
    uint32_t cause;         /* enum towpath_cause */
    int32_t error;          /* errno(3) number, positive; 0 without an error */
    uint64_t bytes, length; /* ended inside a message: its bytes that had arrived, and its length (0: unknown) */
    uint64_t unsent;        /* answers that were not sent completely */
    const uint8_t *rest;    /* bytes that were read and belong to no message; valid until the handle's next poll_ended or close */
    size_t rest_len;
    int fd;                 /* descriptor of a connection that its framing gave back: the caller owns it, it is non-blocking. Otherwise -1 */
    uint32_t reserved;      /* 0 */
    char peer[128];         /* address of the peer; "" if it is not IP */
    char text[256];         /* the cause with details */
};

/* Kind of an event: towpath_mux_event.kind. */
enum towpath_mux_event_kind {
    TOWPATH_ON_UNDONE = 1,      /* a message was abandoned because too many handles ended while they processed it */
    TOWPATH_ON_UNDELIVERED = 2, /* TOWPATH_CONNECTED: a message was not sent completely */
    TOWPATH_ON_SEND_ROOM = 3,   /* TOWPATH_CONNECTED: there is room to send again */
    TOWPATH_ON_NOT_ATTACHED = 4 /* a connection was not attached: its handshake failed */
};

/* An event of a mux. */
struct towpath_mux_event {
    uint32_t kind;                        /* enum towpath_mux_event_kind; later versions may add kinds */
    uint32_t reserved;                    /* 0 */
    struct towpath_connection connection; /* undone: its connection */
    const uint8_t *bytes;                 /* undone, undelivered: the message; valid until the handle's next poll_event or close */
    size_t len;
    uint64_t sent;                        /* undelivered: number of its bytes that were sent */
    char peer[128];                       /* not attached: address of the peer */
    char text[256];                       /* not attached: the reason */
};

/* Addresses and TLS names of a connection; see towpath_worker_event. */
struct towpath_connection_info {
    char peer[128], local[128], listener[128], server_name[256], protocol[256], client_names[1024];
    uint32_t tls;      /* 1 if it has TLS */
    uint32_t starttls; /* 1 if TLS began with STARTTLS or SSLRequest */
};

/* poll_ended and poll_event write the oldest ended connection, or event, of the mux, and return 1, or 0 if there is none. Each is returned to
 * one handle; the last 1,024 are kept. They never wait. connection_info: -ENOENT: the connection has ended. */
int towpath_mux_poll_ended(towpath_mux *mux, struct towpath_mux_ended *ended);
int towpath_mux_poll_event(towpath_mux *mux, struct towpath_mux_event *event);
int towpath_mux_connection_info(const towpath_mux *mux, const struct towpath_connection *connection, struct towpath_connection_info *info);

/* Attaches a connected stream socket with its own framing, or (NULL) the mux's. The descriptor is duplicated: close the caller's.
 * connection may be NULL. -ESHUTDOWN: the mux has drained. */
int towpath_mux_attach(const towpath_mux *mux, int fd, const char *framing, struct towpath_connection *connection);

/* Like towpath_mux_attach, with a framing. */
int towpath_mux_attach_framed(const towpath_mux *mux, int fd, const towpath_framing *framing, struct towpath_connection *connection);

/* Detaches a connection: waits until its messages are done and answered, at most timeout milliseconds (-1: forever). Returns the descriptor,
 * which the caller owns and which is non-blocking. Bytes read after the last message are written to rest, room at most, and their number to
 * length (may be NULL). -ENOENT: not attached; -ENOTCONN: the connection has ended. */
int towpath_mux_unattach(towpath_mux *mux, const struct towpath_connection *connection, int timeout, void *rest, size_t room,
                         size_t *length);

/* 0: stops receiving; messages that the handle has not started to read go to other handles (KCM's RECV_DISABLE). 1: resumes. */
int towpath_mux_set_receive(towpath_mux *mux, int receives);

/* Limits in milliseconds on waits of recv and send (SO_RCVTIMEO, SO_SNDTIMEO); -1: none. */
int towpath_mux_set_timeouts(towpath_mux *mux, int recv, int send);

/* Reads the next message, or the rest of one that was read partially, and waits for it. Returns the number of bytes. Completes the messages
 * read before. flags: MSG_PEEK, MSG_DONTWAIT. message may be NULL. -EAGAIN: no message within the timeout, or receiving is off; -ESHUTDOWN:
 * the mux has drained. */
int towpath_mux_recv(towpath_mux *mux, void *buffer, size_t len, int flags, struct towpath_mux_message *message);

/* Sends a message or a part of one. Returns the number of bytes, which is always len. to: a connection. NULL: the connection of the message
 * that this handle read last, or with TOWPATH_CONNECTED the connection with the least data to send. flags: MSG_MORE, MSG_EOR, MSG_DONTWAIT,
 * and MSG_BATCH (0x40000): more messages follow, so this one may be delayed to be sent with them. -EAGAIN: no room, nothing was accepted;
 * -EMSGSIZE; -EPIPE: the connection or message no longer exists; -ENOTCONN: no connection is open; -EDESTADDRREQ: to is NULL and this
 * handle has read no message. */
int towpath_mux_send(towpath_mux *mux, const struct towpath_connection *to, const void *bytes, size_t len, int flags);

/* Ends the mux for all handles: stops listening and reading. Messages that were received are answered and sent, for at most timeout
 * milliseconds (-1: no limit); then recv returns -ESHUTDOWN. Does not wait. */
int towpath_mux_drain(const towpath_mux *mux, int timeout);

/* Completes the messages that this handle has read; their connections continue if they waited for that. */
int towpath_mux_done(towpath_mux *mux);

/* Flag of towpath_mux_arm: also wait for room to send. */
#define TOWPATH_ROOM 1u

/* For event loops. fd returns a descriptor to poll for reading, valid until close; use it for polling only. Call arm before each poll: 1: poll
 * now; 0: a message or the end is pending, or with TOWPATH_ROOM there is room to send to that connection (NULL: see towpath_mux_send; an
 * answer always has room). After each poll call disarm, then receive with MSG_DONTWAIT until -EAGAIN, because other handles are not woken for
 * that message. arm completes the messages that were read; with TOWPATH_ROOM it does not, and a handle with such a message is woken for room
 * only. */
int towpath_mux_fd(const towpath_mux *mux);
int towpath_mux_arm(towpath_mux *mux, const struct towpath_connection *to, uint32_t flags);
int towpath_mux_disarm(towpath_mux *mux);

#ifdef __cplusplus
}
#endif

#endif

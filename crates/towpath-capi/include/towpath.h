/* towpath.h: inspectors, workers, senders and the multiplexor of Towpath in C. libtowpath 0.1; the guide is docs/book/src/reference/c.md.
 *
 * Results    Functions return 0 or a number that their comment explains, and on failure a negative number of errno(3); what
 *            happened, in words, is towpath_error()'s. -EINVAL: a NULL or a value that the comment does not allow.
 *            -ENOTRECOVERABLE: a defect of this library was caught; close the handle.
 * Handles    are made by attach or open and end with close, which takes NULL too. A handle is used by one thread at a time, of
 *            whichever threads; different handles have nothing to do with each other. A process that forks uses its handles
 *            in one of the two processes, inspectors and workers in the one that attached: its close ends them, whatever the
 *            other one has open.
 * Pointers   are valid for the call only, unless a comment says for how long. A pointer with a length may be NULL when the
 *            length is 0. What a function writes to need not be initialised; on failure it is left alone.
 * Signals    whose handlers run while a function waits end it with -EINTR, if its comment says so; nothing is lost then, and
 *            it may be called again. */
#ifndef TOWPATH_H
#define TOWPATH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TOWPATH_VERSION "0.1.0"

/* The version of the library, which a program may compare with TOWPATH_VERSION. Static. */
const char *towpath_version(void);

/* Why the last call of this thread that failed did so: a sentence for a person. "" before any failed, and in destructors of a thread
 * that ends (pthread_key_create(3)). Valid until the thread ends or a call of it fails. */
const char *towpath_error(void);

/* ---- Inspectors: packets from a rule's queue, verdicts back -------------------------------------------------------------- */

typedef struct towpath_inspector towpath_inspector;

/* What names a frame or message to this library. Nothing in it is for you; to change it hurts nobody. */
struct towpath_ticket {
    uint32_t lane, seq, at;
};

/* What is in a frame: towpath_frame.kind. */
enum towpath_kind {
    TOWPATH_PACKET = 0,  /* a packet, link header first */
    TOWPATH_MESSAGE = 1, /* a message */
    TOWPATH_EVENT = 2,   /* something happened */
    TOWPATH_GAP = 8      /* frames for you were lost: wire_len says how many, mark why (towpath_loss). Decide it as any. */
};

/* Why frames were lost. */
enum towpath_loss {
    TOWPATH_LOST_NO_ROOM = 1,     /* you had not given enough frames back */
    TOWPATH_LOST_OLDEST = 2,      /* they gave way to newer ones */
    TOWPATH_LOST_DROPPED = 3,     /* dropped uninspected: the queue fails closed */
    TOWPATH_LOST_PASSED = 4,      /* passed uninspected: the queue fails open */
    TOWPATH_LOST_HANDED_ON = 5,   /* given to another queue */
    TOWPATH_LOST_TOO_LARGE = 6,   /* larger than anything that may be sent */
    TOWPATH_LOST_OVERWRITTEN = 7, /* a tap was too slow */
    TOWPATH_LOST_LIMITED = 8      /* beyond what you asked for */
};

struct towpath_frame {
    /* The bytes, in the ring's memory, which is mapped for reading only. Valid until the frame is decided or the inspector
     * closed. */
    const uint8_t *payload;
    size_t len;
    uint64_t time;     /* nanoseconds since the epoch */
    uint32_t wire_len; /* bytes that the packet had on the wire; len is less when it was cut */
    uint32_t kind;     /* enum towpath_kind, or a number that is not there yet */
    uint32_t queue;
    uint32_t mark;
    uint32_t port;          /* the port that it came from */
    uint32_t hash;          /* of its flow; the same in both directions */
    uint32_t pid, uid, gid; /* of the sender, when that was a local process; 0 for the network */
    uint32_t lost;          /* frames lost between the one before and this one; 65535 for that many or more */
    uint16_t link_type;     /* as in pcap files */
    uint16_t network;       /* offset of what follows the link header: the IP header of an IP packet */
    uint16_t data;          /* offset of the upper layer's payload; len when it has none */
    uint16_t reserved;
    struct towpath_ticket ticket;
};

/* What is to happen to a frame. To say it gives the frame back, except TOWPATH_HOLD. */
enum towpath_verdict {
    TOWPATH_PASS = 1,   /* let it go on */
    TOWPATH_DROP = 2,   /* drop it */
    TOWPATH_REJECT = 3, /* drop it and tell the sender (reset or unreachable) */
    TOWPATH_QUEUE = 5,  /* to another queue: TOWPATH_QUEUE_NR */
    TOWPATH_REPEAT = 6, /* through the rules again */
    TOWPATH_HOLD = 7    /* keep it: others go on, this one is decided later, in any order */
};
/* To queue n, 0 to 65535. */
#define TOWPATH_QUEUE_NR(n) ((uint32_t)TOWPATH_QUEUE | (uint32_t)(n) << 16)
/* Or-ed to a verdict: it is for this flow from now on, not only for this frame. */
#define TOWPATH_FLOW 0x100u

/* Flags of towpath_inspector_attach. */
#define TOWPATH_NO_GAPS 1u /* no frames of kind TOWPATH_GAP; towpath_frame.lost still counts */

struct towpath_ring_stats {
    uint64_t received; /* frames */
    uint64_t lost;     /* frames that were meant for you and lost */
    uint64_t sleeps;   /* times it slept */
    uint64_t wakeups;  /* doorbells rung */
    uint64_t oneshots; /* messages sent in a memory of their own, larger than the ring */
};

/* Attaches to the engine's socket at path; NULL: to the one that started this program, which TOWPATH_SOCKET names. The engine
 * shows name to people, 32 bytes at most; NULL: the program's. flags: TOWPATH_NO_GAPS.
 * -EDESTADDRREQ: TOWPATH_SOCKET is not set; -EPERM: the engine does not allow this user; -EPROTONOSUPPORT: engine and library
 * are of different versions; -ENOBUFS: a limit of the engine; -EPROTO: no engine; connect(2)'s. */
int towpath_inspector_attach(const char *path, const char *name, unsigned flags, towpath_inspector **inspector);

/* Ends it. What was not decided gets the queue's default verdict. */
void towpath_inspector_close(towpath_inspector *inspector);

/* The next frame. timeout in milliseconds: -1 waits for ever, 0 not at all. 1: there is one; 0: the engine has ended the
 * channel and everything was received; -EAGAIN: none came in time; -EINTR; -EPROTO: the engine wrote nonsense. */
int towpath_inspector_recv(towpath_inspector *inspector, struct towpath_frame *frame, int timeout);

/* At most max frames into an array; waits for the first one as above. How many, or as above. Made for throughput: with timeout
 * -1, after several frames, the next call may let some microseconds pass so that there are several again. */
int towpath_inspector_recv_batch(towpath_inspector *inspector, struct towpath_frame *frames, size_t max, int timeout);

/* Decides about the frame: enum towpath_verdict, TOWPATH_QUEUE_NR(n), with TOWPATH_FLOW. The engine sees it at once; one that
 * sleeps is woken by the next call that receives, or by flush. -ESTALE: it was decided before (nothing happens). */
int towpath_inspector_verdict(towpath_inspector *inspector, const struct towpath_frame *frame, uint32_t verdict);

/* The same, and sets the bits of the packet's mark that mask names to those of mark. */
int towpath_inspector_verdict_mark(towpath_inspector *inspector, const struct towpath_frame *frame, uint32_t verdict,
                                   uint32_t mark, uint32_t mask);

/* Decides, in one write, about every frame up to this one, on the same lane (an engine thread each), that is neither decided
 * nor held. Not TOWPATH_HOLD. */
int towpath_inspector_verdict_upto(towpath_inspector *inspector, const struct towpath_frame *frame, uint32_t verdict);

/* The same for every frame received so far. */
int towpath_inspector_verdict_all(towpath_inspector *inspector, uint32_t verdict);

/* Lets the frame go on with another payload, which is copied; waits while the ring towards the engine is full. -EMSGSIZE: the
 * engine does not take so much; -EPIPE: it is gone; -EINTR; -ESTALE. The frame is still there to be decided on failure. */
int towpath_inspector_replace(towpath_inspector *inspector, const struct towpath_frame *frame, const void *payload,
                              size_t len);

/* Wakes the engine if it sleeps and something was decided. */
int towpath_inspector_flush(towpath_inspector *inspector);

/* For event loops. fd is a descriptor to poll for reading, valid until close; only poll it. Before each poll, arm: 1: poll
 * now; 0: there is a frame or the end already, receive first. After each poll, disarm, then receive with timeout 0 until it
 * says -EAGAIN. */
int towpath_inspector_fd(const towpath_inspector *inspector);
int towpath_inspector_arm(towpath_inspector *inspector);
int towpath_inspector_disarm(towpath_inspector *inspector);

/* What it has done. */
int towpath_inspector_stats(const towpath_inspector *inspector, struct towpath_ring_stats *stats);

/* ---- Workers: messages of a mux's connections, answers back (towpath mux) ------------------------------------------------ */

typedef struct towpath_worker towpath_worker;

/* Names a connection of the mux; not valid for another one later. */
struct towpath_connection {
    uint32_t index, generation;
};

struct towpath_message {
    /* All bytes of the message, in the ring's memory, which is mapped for reading only. Valid until it is done or the worker
     * closed; in towpath_worker_serve, for the call. */
    const uint8_t *bytes;
    size_t len;
    /* What the framing leaves of it when it strips a header or delimiter; else all of it. */
    const uint8_t *payload;
    size_t payload_len;
    uint64_t time; /* nanoseconds since the epoch */
    struct towpath_connection connection;
    uint32_t mark, hash; /* the framing's; 0 without */
    struct towpath_ticket ticket;
};

/* Attaches to the mux's socket: as towpath_inspector_attach, without flags. */
int towpath_worker_attach(const char *path, const char *name, towpath_worker **worker);

/* Ends it. Messages that are not done go to another worker, unless they were answered. */
void towpath_worker_close(towpath_worker *worker);

/* The next message: as towpath_inspector_recv. 0: the mux wants this worker no more. */
int towpath_worker_recv(towpath_worker *worker, struct towpath_message *message, int timeout);

/* Answers the message on the connection that it came from; the bytes are copied. Waits while the ring is full. There may be
 * several answers. What was answered is not given to another worker when this one dies. -EMSGSIZE: the mux does not take so
 * much; -EPIPE: it is gone; -EINTR; -ESTALE: the message was done before. */
int towpath_worker_reply(towpath_worker *worker, const struct towpath_message *message, const void *bytes, size_t len);

/* The message is done: its memory goes back, and the mux may give more. -ESTALE: it was done before (nothing happens). */
int towpath_worker_done(towpath_worker *worker, const struct towpath_message *message);

/* Sends a message on that connection, as reply does; nothing happens if it has ended. NULL, in connected mode: on the
 * connection that has the least to send. */
int towpath_worker_send(towpath_worker *worker, const struct towpath_connection *connection, const void *bytes, size_t len);

/* Where the answer to a message goes in towpath_worker_serve. Appends bytes to it, which are copied. */
typedef struct towpath_reply towpath_reply;
int towpath_reply_append(towpath_reply *reply, const void *bytes, size_t len);

/* Does one message. Must not jump out of itself (longjmp, exceptions), nor use the worker. */
typedef void towpath_work(const struct towpath_message *message, towpath_reply *reply, void *context);

/* Does messages until the mux wants this worker no more: as recv, reply and done, with less to do for each. at_once: short
 * messages of a connection that it takes at once, 1 to 64 (docs/book/src/reference/mux.md says what that costs). 0: the end; -EINTR: call it
 * again; -EMSGSIZE: an answer was too long, and what it was to is done without one: call it again for the others; else as recv and
 * reply. */
int towpath_worker_serve(towpath_worker *worker, unsigned at_once, towpath_work *work, void *context);

/* As those of inspectors. */
int towpath_worker_flush(towpath_worker *worker);
int towpath_worker_fd(const towpath_worker *worker);
int towpath_worker_arm(towpath_worker *worker);
int towpath_worker_disarm(towpath_worker *worker);
int towpath_worker_stats(const towpath_worker *worker, struct towpath_ring_stats *stats);

/* ---- Senders: TCP and UDP without copying what is sent (docs/book/src/reference/send.md) ---------------------------------------------------- */

typedef struct towpath_sender towpath_sender;

/* towpath_sender_options.choice. */
enum towpath_choice {
    TOWPATH_ADAPTIVE = 0, /* zero copy where probes show that it works, plain elsewhere */
    TOWPATH_ZEROCOPY = 1, /* zero copy for all that is long enough */
    TOWPATH_PLAIN = 2     /* plain sends */
};

/* Zeros are the defaults. */
struct towpath_sender_options {
    uint32_t choice;       /* enum towpath_choice */
    uint16_t segment;      /* UDP: each buffer is cut into datagrams of so many bytes (UDP_SEGMENT) */
    uint16_t tamper_check; /* 1: compares checksums at send and completion; costs a reading of every byte, twice */
    uint32_t stall;        /* milliseconds that a peer may take nothing before a call gives up; 0: for ever */
    uint32_t max_buffers;  /* most buffers that it holds */
    uint64_t max_pinned;   /* most bytes that it pins */
};

struct towpath_sender_counters {
    uint64_t zerocopy_bytes; /* that left without a copy */
    uint64_t copied_bytes;   /* that were to, and the kernel copied */
    uint64_t plain_bytes;    /* that were sent plain */
    uint64_t calls;          /* zero-copy calls */
    uint64_t completed;      /* of these, completed */
    uint64_t copied;         /* of these, reported as copied */
    uint64_t no_buffers;     /* calls that the kernel had no memory for (ENOBUFS); they went plain */
    uint64_t tampered;       /* buffers that were changed while they were lent, where that is checked */
};

/* A sender for a connected TCP or UDP socket; options may be NULL. The descriptor is duplicated: close yours when you like; the
 * socket is closed when both are. Nobody else sends with MSG_ZEROCOPY on it, or reads its error queue. -ENOTSOCK, -EBADF;
 * -EOPNOTSUPP: TOWPATH_ZEROCOPY, and the socket does not do it. */
int towpath_sender_open(int fd, const struct towpath_sender_options *options, towpath_sender **sender);

/* Queues a buffer, to be sent together with those after it. From now on it is lent: do not write to it, nor free it, until
 * towpath_sender_reclaim gives its id, or close its end. Never waits. -EAGAIN: max_buffers are lent: reclaim some, drain if
 * there are none; this one is not lent. -EMSGSIZE: a datagram that is longer than the socket takes; others can be sent.
 * -EPIPE, -ECONNRESET and others of send(2): the connection is over, close it; the buffer may be lent all the same. */
int towpath_sender_queue(towpath_sender *sender, uint64_t id, const void *bytes, size_t len);

/* Waits until the kernel has taken everything that is queued; it may read it still. -ETIMEDOUT: the peer took nothing for
 * options.stall; else as queue. */
int towpath_sender_flush(towpath_sender *sender);

/* Writes the ids of at most max buffers that the kernel is done with, and that are yours again; how many. Never waits. */
int towpath_sender_reclaim(towpath_sender *sender, uint64_t *ids, size_t max);

/* Waits until everything is sent and the kernel done with it, at most timeout milliseconds (-1: for ever). 1: so it is, and all
 * buffers can be reclaimed; 0: not in time; else as flush. */
int towpath_sender_drain(towpath_sender *sender, int timeout);

/* The socket, to poll for POLLERR: then buffers may have come back. Valid until close. */
int towpath_sender_fd(const towpath_sender *sender);

/* What was counted. */
int towpath_sender_counters(const towpath_sender *sender, struct towpath_sender_counters *counters);

/* Ends the connection: sends what is queued, announces the end (shutdown(2)), waits for completions, at most timeout milliseconds
 * (0 and more; with another number -EINVAL, and nothing has happened), and frees the sender, whatever comes of it. 1: everything was sent, and every buffer is yours again. 0: the
 * connection was reset; the kernel may still read some buffers, whose ids are written, max at most, and their number to pinned:
 * leave these alone for a minute; all others are yours. ids and pinned may be NULL. After a failure, so it is with all that
 * were lent. */
int towpath_sender_close(towpath_sender *sender, int timeout, uint64_t *ids, size_t max, size_t *pinned);

/* ---- A multiplexor in this process: handles with a socket's calls, as Linux's KCM has them (docs/book/src/reference/mux.md) ----------------- */

/* A handle of a mux, as a KCM socket is: messages of all its connections come to whichever handle asks. For several threads, clone
 * it. Waits are not ended by signals. */
typedef struct towpath_mux towpath_mux;

/* Flag of towpath_mux_socket: all connections lead to one equivalent peer, so that a message may go to any. */
#define TOWPATH_CONNECTED 1u

/* What a read brought. */
struct towpath_mux_message {
    size_t length;                        /* bytes of the message from the first of those read on: a datagram's real length */
    size_t skip, trim;                    /* bytes of the message that the framing strips in front and behind; they are read too */
    struct towpath_connection connection; /* where it came from */
    uint32_t flags;                       /* MSG_TRUNC: the rest was dropped; MSG_EOR: these bytes end the message */
    uint32_t mark, hash;                  /* the framing's; 0 without */
    uint32_t reserved;
};

/* A mux and its first handle. type: SOCK_DGRAM (each send is a message unless it says MSG_MORE; a read that is shorter than the
 * message drops the rest) or SOCK_SEQPACKET (the send that says MSG_EOR ends a message; a shorter read leaves the rest to the next).
 * framing: a preset or description (docs/book/src/reference/framing.md). -EINVAL: the framing, and where it is wrong; -EPROTONOSUPPORT: the type. */
int towpath_mux_socket(int type, const char *framing, uint32_t flags, towpath_mux **mux);

/* What a mux holds at most, and for how long (docs/book/src/reference/mux.md, "Bounds"). Zeros are the defaults. */
struct towpath_mux_options {
    uint64_t message_max;      /* bytes of a message, above which its connection ends; 16 MiB */
    uint64_t head_max;         /* bytes of one before its length is known, for framings that do not bound that; 64 KiB */
    uint64_t connection_bytes; /* bytes of a connection's messages that are not done, from which on it is not read; 1 MiB */
    uint64_t send_bytes;       /* bytes that its peer has not taken, from which on it is not read; 256 KiB */
    uint64_t send_most;        /* and above which it ends; 16 MiB, or two of message_max if that is set and they are more */
    uint64_t mux_bytes;        /* bytes of everything, from which on nothing is read; 256 MiB */
    uint32_t head_time;        /* milliseconds from a message's first byte until its length is known, of a line its end; for ever */
    uint32_t body_time;        /* and then until its last byte, from the first on, besides what rate gives; for ever */
    uint32_t rate;             /* bytes per second: a long message has length / rate beyond body_time; nothing */
    uint32_t idle;             /* milliseconds that a connection may be without traffic and work; for ever */
    uint32_t send_time;        /* milliseconds that a peer may take nothing of what is sent; 60 s, UINT32_MAX: for ever */
    uint32_t reserved;         /* 0 */
};

/* What a mux counted, over all its handles; received = done + undone + queued + in_hand. */
struct towpath_mux_counters {
    uint64_t connections;    /* attached now */
    uint64_t attached;       /* and ever */
    uint64_t ended;          /* of these, ended, however; the errors are below */
    uint64_t received;       /* whole messages that arrived */
    uint64_t received_bytes; /* their bytes */
    uint64_t done;           /* messages that were read and are done */
    uint64_t undone;         /* that were given up */
    uint64_t queued;         /* that no handle has begun to read */
    uint64_t in_hand;        /* that handles have, and that are not done */
    uint64_t sent;           /* messages that were sent, all of them */
    uint64_t sent_bytes;     /* bytes that were sent */
    uint64_t unsent;         /* messages that were not, or not all of them, because their connection ended */
    uint64_t bytes;          /* bytes that the mux holds */
    uint64_t resets;         /* connections that were reset, or where a read or write failed */
    uint64_t inside;         /* that their peers closed inside a message */
    uint64_t malformed;      /* whose bytes are no message, or say a length that cannot be */
    uint64_t too_long;       /* with a message above message_max, or head_max */
    uint64_t late;           /* with a message that was not known or whole in time: head_time, body_time */
    uint64_t idle;           /* that were idle for too long */
    uint64_t send_timeouts;  /* whose peers took nothing for send_time */
    uint64_t send_full;      /* for which there was more than send_most */
    uint64_t mux_full;       /* that held most when mux_bytes was not enough */
    uint64_t drain_timeouts; /* that were not drained in time */
};

/* As towpath_mux_socket, with bounds of its own; options may be NULL. */
int towpath_mux_socket_with(int type, const char *framing, uint32_t flags, const struct towpath_mux_options *options,
                            towpath_mux **mux);

/* What was counted. */
int towpath_mux_counters(const towpath_mux *mux, struct towpath_mux_counters *counters);

/* Another handle of the same mux and type. -ENOTCONN: it drains. */
int towpath_mux_clone(const towpath_mux *mux, towpath_mux **clone);

/* Closes the handle. Messages that it has not read to their end go to others. Behind the last handle, waits until what is to be
 * sent is sent, at most timeout milliseconds (0 and more; with another number -EINVAL, and it is not closed). 1: so it is, or there are
 * other handles; 0: not in time. */
int towpath_mux_close(towpath_mux *mux, int timeout);

/* Listens at "HOST:PORT" and attaches what connects; the port is written (port may be NULL). */
int towpath_mux_listen(const towpath_mux *mux, const char *address, uint16_t *port);

/* Attaches a connected stream socket, with a framing of its own or (NULL) the mux's. The descriptor is duplicated: close yours.
 * connection may be NULL. -ESHUTDOWN: the mux has drained. */
int towpath_mux_attach(const towpath_mux *mux, int fd, const char *framing, struct towpath_connection *connection);

/* Takes a connection back: waits until its messages are done and answered, at most timeout milliseconds (-1: for ever). The
 * descriptor, which is yours and non-blocking. Bytes that were read behind the last message are written to rest, room at most, and
 * their number to length (which may be NULL). -ENOENT: it is not attached; -ENOTCONN: it ended otherwise. */
int towpath_mux_unattach(towpath_mux *mux, const struct towpath_connection *connection, int timeout, void *rest, size_t room,
                         size_t *length);

/* 0: receives no more; what it has not begun to read goes to other handles (KCM's RECV_DISABLE). 1: again. */
int towpath_mux_set_receive(towpath_mux *mux, int receives);

/* Milliseconds that recv and send wait at most (SO_RCVTIMEO, SO_SNDTIMEO); -1: for ever. */
int towpath_mux_set_timeouts(towpath_mux *mux, int recv, int send);

/* Reads the next message, or goes on with one that was read in part; how many bytes. Waits for it. Messages that were read before are
 * done. flags: MSG_PEEK, MSG_DONTWAIT. message may be NULL. -EAGAIN: nothing in time, or it does not receive; -ESHUTDOWN: the mux
 * has drained. */
int towpath_mux_recv(towpath_mux *mux, void *buffer, size_t len, int flags, struct towpath_mux_message *message);

/* Sends a message or a part of one; how many bytes, all of them. to: a connection; NULL: who asked (the connection of the message
 * that this handle read last), or with TOWPATH_CONNECTED the connection that has the least to send. flags: MSG_MORE, MSG_EOR,
 * MSG_DONTWAIT, and MSG_BATCH (0x40000): more messages follow, this one may leave with them. -EAGAIN: no room now, nothing was
 * taken; -EMSGSIZE; -EPIPE: that connection or message is gone; -ENOTCONN: no connection is open; -EDESTADDRREQ: nobody asked. */
int towpath_mux_send(towpath_mux *mux, const struct towpath_connection *to, const void *bytes, size_t len, int flags);

/* The messages that this handle has read are done: their connections go on where they waited for that. */
int towpath_mux_done(towpath_mux *mux);

/* Flag of towpath_mux_arm: room to send is waited for as well. */
#define TOWPATH_ROOM 1u

/* For event loops. fd is a descriptor to poll for reading, valid until close; only poll it. Before each poll, arm: 1: poll now; 0: there
 * is a message or the end already, or with TOWPATH_ROOM room to send to that connection (NULL: as in towpath_mux_send; an answer always
 * has it). After each poll, disarm, then receive with MSG_DONTWAIT until it says -EAGAIN: others wait for who was woken for a message.
 * Messages that were read are done by arm; with TOWPATH_ROOM they are not, and who has one is woken for room only. */
int towpath_mux_fd(const towpath_mux *mux);
int towpath_mux_arm(towpath_mux *mux, const struct towpath_connection *to, uint32_t flags);
int towpath_mux_disarm(towpath_mux *mux);

#ifdef __cplusplus
}
#endif

#endif

package towpath

/*
#include <stdlib.h>
#include <towpath.h>

// What the library reads of a message, without pointers into the ring.
static struct towpath_message towpath_go_message(struct towpath_message message)
{
	message.bytes = message.payload = NULL;
	message.len = message.payload_len = 0;
	return message;
}
*/
import "C"

import (
	"context"
	"io"
	"syscall"
	"time"
	"unsafe"
)

// WorkerConfig configures a worker. The zero value attaches to the mux that started the program.
type WorkerConfig struct {
	// Socket is the path of the mux's socket; "": the environment variable TOWPATH_SOCKET, which the mux sets for programs that it starts.
	Socket string
	// Name is the name in the log and in the output of towpath ctl, 32 bytes at most; "": the program's name.
	Name string
	// Parts receives long messages in parts; required by a framing with body=stream.
	Parts bool
}

// Worker receives messages of a mux's connections and sends answers.
type Worker struct {
	channel
	handle *C.towpath_worker
	// message is guarded by receiving.
	message C.struct_towpath_message
}

// Connection identifies a connection of the mux; never reused for another connection.
type Connection struct {
	Index, Generation uint32
}

// WorkerMessage is a message of a connection.
type WorkerMessage struct {
	// Bytes is the whole message, in the ring's memory. It is valid until the message is done or the worker is closed. Reading it later, or
	// writing to it, may crash the process.
	Bytes []byte
	// Payload is the message without a header or delimiter that the framing strips.
	Payload    []byte
	Time       time.Time
	Connection Connection
	// Mark and Hash are set by the framing; 0 without.
	Mark, Hash uint32
	// Part is the number of this part, from 1; 0: a whole message. More: another part follows. Cut: the connection ended before the last
	// part, and none follows. See WorkerConfig.Parts.
	Part      uint32
	More, Cut bool

	worker *Worker
	c      C.struct_towpath_message
}

// AttachWorker attaches to the socket of a mux.
func AttachWorker(config WorkerConfig) (*Worker, error) {
	path, name := optional(config.Socket), optional(config.Name)
	defer C.free(unsafe.Pointer(path))
	defer C.free(unsafe.Pointer(name))
	var flags C.uint
	if config.Parts {
		flags |= C.TOWPATH_PARTS
	}
	w := &Worker{}
	if _, err := call(func() C.int { return C.towpath_worker_attach_with(path, name, flags, &w.handle) }); err != nil {
		return nil, err
	}
	w.arm = func() C.int { return C.towpath_worker_arm(w.handle) }
	w.disarm = func() C.int { return C.towpath_worker_disarm(w.handle) }
	w.flush = func() C.int { return C.towpath_worker_flush(w.handle) }
	if err := w.start(C.towpath_worker_fd(w.handle)); err != nil {
		C.towpath_worker_close(w.handle)
		return nil, err
	}
	return w, nil
}

// Close detaches from the mux. Messages that are neither done nor answered go to another worker. It ends a Recv that waits, with
// [os.ErrClosed].
func (w *Worker) Close() error {
	return w.close(func() { C.towpath_worker_close(w.handle) })
}

// Recv receives the next message. It waits until the context ends. It returns [io.EOF] when the mux has ended the channel.
func (w *Worker) Recv(ctx context.Context) (*WorkerMessage, error) {
	var received *WorkerMessage
	_, err := w.receive(ctx, func() C.int {
		got := C.towpath_worker_recv(w.handle, &w.message, 0)
		if got == 1 {
			received = w.copy(&w.message)
		}
		return got
	})
	return received, err
}

func (w *Worker) copy(from *C.struct_towpath_message) *WorkerMessage {
	message := &WorkerMessage{
		Bytes:      unsafe.Slice((*byte)(from.bytes), int(from.len)),
		Payload:    unsafe.Slice((*byte)(from.payload), int(from.payload_len)),
		Time:       time.Unix(0, int64(from.time)),
		Connection: Connection{uint32(from.connection.index), uint32(from.connection.generation)},
		Mark:       uint32(from.mark),
		Hash:       uint32(from.hash),
		Part:       uint32(from.part),
		More:       from.more != 0,
		Cut:        from.cut != 0,
		worker:     w,
	}
	message.c = C.towpath_go_message(*from)
	return message
}

// Reply answers the message; the bytes are copied. It waits while the ring is full. A message has one answer. An answered message is not
// given to another worker if this one ends. [syscall.EMSGSIZE]: larger than the mux accepts; [syscall.ESTALE]: the message is done.
func (m *WorkerMessage) Reply(answer []byte) error {
	_, err := m.worker.use(func() C.int {
		return C.towpath_worker_reply(m.worker.handle, &m.c, unsafe.Pointer(unsafe.SliceData(answer)), C.size_t(len(answer)))
	})
	return err
}

// ReplyPart sends a part of the answer. Reply sends the last part, which may be empty.
func (m *WorkerMessage) ReplyPart(part []byte) error {
	_, err := m.worker.use(func() C.int {
		return C.towpath_worker_reply_part(m.worker.handle, &m.c, unsafe.Pointer(unsafe.SliceData(part)), C.size_t(len(part)))
	})
	return err
}

// CloseAfter closes the message's connection after its answer and everything that was sent before.
func (m *WorkerMessage) CloseAfter() error {
	_, err := m.worker.use(func() C.int { return C.towpath_worker_close_after(m.worker.handle, &m.c) })
	return err
}

// Done completes the message and returns its memory to the mux. A second call fails with [syscall.ESTALE].
func (m *WorkerMessage) Done() error {
	_, err := m.worker.use(func() C.int { return C.towpath_worker_done(m.worker.handle, &m.c) })
	return err
}

// Send sends a message on a connection that the worker has received a message from; the bytes are copied. It has no effect if the
// connection has ended.
func (w *Worker) Send(connection Connection, message []byte) error {
	to := connection.c()
	_, err := w.use(func() C.int {
		return C.towpath_worker_send(w.handle, &to, unsafe.Pointer(unsafe.SliceData(message)), C.size_t(len(message)))
	})
	return err
}

// CloseConnection closes a connection after everything that was sent before.
func (w *Worker) CloseConnection(connection Connection) error {
	to := connection.c()
	_, err := w.use(func() C.int { return C.towpath_worker_close_connection(w.handle, &to) })
	return err
}

// ResetConnection resets a connection at once.
func (w *Worker) ResetConnection(connection Connection) error {
	to := connection.c()
	_, err := w.use(func() C.int { return C.towpath_worker_reset_connection(w.handle, &to) })
	return err
}

func (c Connection) c() C.struct_towpath_connection {
	return C.struct_towpath_connection{index: C.uint32_t(c.Index), generation: C.uint32_t(c.Generation)}
}

// Unsent is a message of Send that was not sent.
type Unsent struct {
	Connection Connection
	Message    []byte
	// Err is [syscall.EPIPE]: the connection ended; [syscall.EAGAIN]: its queue was full.
	Err error
}

// PollUnsent returns a copy of the oldest message that came back unsent, or nil. It never waits.
func (w *Worker) PollUnsent() (*Unsent, error) {
	var unsent *Unsent
	_, err := w.use(func() C.int {
		var back C.struct_towpath_unsent
		got := C.towpath_worker_poll_unsent(w.handle, &back)
		if got == 1 {
			unsent = &Unsent{
				Connection: Connection{uint32(back.connection.index), uint32(back.connection.generation)},
				Message:    append([]byte(nil), unsafe.Slice((*byte)(back.bytes), int(back.len))...),
				Err:        syscall.Errno(back.error),
			}
		}
		return got
	})
	return unsent, err
}

// Serve calls handler for each message until the context ends or the mux ends the channel. The bytes that handler returns are the answer;
// those of a part with More are a part of the answer. It returns nil at the end of the channel. An error of handler ends Serve, without an
// answer to the message; after Close, another worker gets it.
func (w *Worker) Serve(ctx context.Context, handler func(*WorkerMessage) ([]byte, error)) error {
	for {
		message, err := w.Recv(ctx)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		answer, err := handler(message)
		switch {
		case err != nil:
			return err
		case message.Cut:
		case message.More:
			err = message.ReplyPart(answer)
		default:
			err = message.Reply(answer)
		}
		if err != nil {
			return err
		}
		if err := message.Done(); err != nil {
			return err
		}
	}
}

package towpath

/*
#include <stdlib.h>
#include <towpath.h>

// Without a pointer to a C struct in the arguments: Go passes the ticket by value.
static int towpath_go_verdict(towpath_inspector *inspector, struct towpath_ticket ticket, uint32_t verdict)
{
	struct towpath_frame frame = {.ticket = ticket};
	return towpath_inspector_verdict(inspector, &frame, verdict);
}

static int towpath_go_verdict_mark(towpath_inspector *inspector, struct towpath_ticket ticket, uint32_t verdict, uint32_t mark, uint32_t mask)
{
	struct towpath_frame frame = {.ticket = ticket};
	return towpath_inspector_verdict_mark(inspector, &frame, verdict, mark, mask);
}

static int towpath_go_verdict_upto(towpath_inspector *inspector, struct towpath_ticket ticket, uint32_t verdict)
{
	struct towpath_frame frame = {.ticket = ticket};
	return towpath_inspector_verdict_upto(inspector, &frame, verdict);
}

static int towpath_go_replace(towpath_inspector *inspector, struct towpath_ticket ticket, const void *payload, size_t len)
{
	struct towpath_frame frame = {.ticket = ticket};
	return towpath_inspector_replace(inspector, &frame, payload, len);
}
*/
import "C"

import (
	"context"
	"sync"
	"time"
	"unsafe"
)

// Verdict is the decision about a frame.
type Verdict uint32

const (
	Pass   Verdict = C.TOWPATH_PASS   // pass the frame
	Drop   Verdict = C.TOWPATH_DROP   // drop it
	Reject Verdict = C.TOWPATH_REJECT // drop it and notify the sender (TCP reset or ICMP unreachable)
	Repeat Verdict = C.TOWPATH_REPEAT // evaluate the rules again
	Hold   Verdict = C.TOWPATH_HOLD   // keep it for a later verdict, in any order, without delaying other frames
)

// Queue is the verdict that sends the frame to another queue.
func Queue(number uint16) Verdict { return C.TOWPATH_QUEUE | Verdict(number)<<16 }

// Flow returns the verdict for the frame and for the rest of its flow.
func (v Verdict) Flow() Verdict { return v | C.TOWPATH_FLOW }

// Kind is the kind of a frame.
type Kind uint32

const (
	Packet  Kind = C.TOWPATH_PACKET  // a packet, starting with its link header
	Message Kind = C.TOWPATH_MESSAGE // a message
	Event   Kind = C.TOWPATH_EVENT   // an event
	Gap     Kind = C.TOWPATH_GAP     // frames were lost: WireLen has their number, Mark the reason
)

// InspectorConfig configures an inspector. The zero value attaches to the engine that started the program.
type InspectorConfig struct {
	// Socket is the path of a queue's socket; "": the environment variable TOWPATH_SOCKET, which the engine sets for programs that it starts.
	Socket string
	// Name is the name in the log and in the output of towpath ctl, 32 bytes at most; "": the program's name.
	Name string
	// Gaps delivers frames of kind Gap, which are decided like any frame. Frame.Lost counts lost frames in any case.
	Gaps bool
}

// Inspector receives the frames of a queue and decides them.
type Inspector struct {
	channel
	handle *C.towpath_inspector
	// batch is guarded by receiving.
	batch []C.struct_towpath_frame
	// undecided is used by Register.
	undecided undecided
}

// Frame is a frame of a queue. Values are copies, except for Payload.
type Frame struct {
	// Payload is the frame with its link header, in the ring's memory. It is valid until the frame is decided or the inspector is closed.
	// Reading it later, or writing to it, may crash the process.
	Payload []byte
	Time    time.Time
	// WireLen is the length on the wire. Payload is shorter if the frame was truncated.
	WireLen uint32
	Kind    Kind
	Queue   uint32
	Mark    uint32
	// Port is the port that received the frame.
	Port uint32
	// Hash is a hash of the flow, the same in both directions.
	Hash uint32
	// PID, UID and GID are those of the process that sent a message or an event; 0 for a packet.
	PID, UID, GID uint32
	// Lost is the number of frames lost before this one; 65535 means that many or more.
	Lost uint32
	// LinkType is that of pcap files.
	LinkType uint16
	// Network is the offset of the data after the link header, such as the IP header. Data is the offset of the upper layer's payload, and
	// len(Payload) without one.
	Network, Data uint16

	inspector *Inspector
	ticket    C.struct_towpath_ticket
}

func optional(text string) *C.char {
	if text == "" {
		return nil
	}
	return C.CString(text)
}

// AttachInspector attaches to the socket of a queue.
func AttachInspector(config InspectorConfig) (*Inspector, error) {
	path, name := optional(config.Socket), optional(config.Name)
	defer C.free(unsafe.Pointer(path))
	defer C.free(unsafe.Pointer(name))
	flags := C.uint(C.TOWPATH_NO_GAPS)
	if config.Gaps {
		flags = 0
	}
	i := &Inspector{}
	if _, err := call(func() C.int { return C.towpath_inspector_attach(path, name, flags, &i.handle) }); err != nil {
		return nil, err
	}
	i.arm = func() C.int { return C.towpath_inspector_arm(i.handle) }
	i.disarm = func() C.int { return C.towpath_inspector_disarm(i.handle) }
	i.flush = func() C.int { return C.towpath_inspector_flush(i.handle) }
	if err := i.start(C.towpath_inspector_fd(i.handle)); err != nil {
		C.towpath_inspector_close(i.handle)
		return nil, err
	}
	return i, nil
}

// Close detaches from the queue. Undecided frames get the queue's default verdict. It ends a Recv that waits, with [os.ErrClosed].
func (i *Inspector) Close() error {
	return i.close(func() { C.towpath_inspector_close(i.handle) })
}

// Recv receives up to len(frames) frames. It waits for the first one until the context ends. It returns [io.EOF] when the engine has ended
// the channel and all frames were received.
func (i *Inspector) Recv(ctx context.Context, frames []Frame) (int, error) {
	if len(frames) == 0 {
		return 0, nil
	}
	count, err := i.receive(ctx, func() C.int {
		if len(i.batch) < len(frames) {
			i.batch = make([]C.struct_towpath_frame, len(frames))
		}
		got := C.towpath_inspector_recv_batch(i.handle, &i.batch[0], C.size_t(len(frames)), 0)
		// Copied while the handle is held: another goroutine may receive into the batch next.
		for n := 0; n < int(got); n++ {
			i.copy(&frames[n], &i.batch[n])
		}
		return got
	})
	return count, err
}

func (i *Inspector) copy(to *Frame, from *C.struct_towpath_frame) {
	*to = Frame{
		Payload:   unsafe.Slice((*byte)(from.payload), int(from.len)),
		Time:      time.Unix(0, int64(from.time)),
		WireLen:   uint32(from.wire_len),
		Kind:      Kind(from.kind),
		Queue:     uint32(from.queue),
		Mark:      uint32(from.mark),
		Port:      uint32(from.port),
		Hash:      uint32(from.hash),
		PID:       uint32(from.pid),
		UID:       uint32(from.uid),
		GID:       uint32(from.gid),
		Lost:      uint32(from.lost),
		LinkType:  uint16(from.link_type),
		Network:   uint16(from.network),
		Data:      uint16(from.data),
		inspector: i,
		ticket:    from.ticket,
	}
}

// SetVerdict decides the frame. A second verdict fails with [syscall.ESTALE], except after Hold.
func (f *Frame) SetVerdict(verdict Verdict) error {
	i := f.inspector
	_, err := i.use(func() C.int { return C.towpath_go_verdict(i.handle, f.ticket, C.uint32_t(verdict)) })
	return err
}

// SetVerdictWithMark is SetVerdict, and replaces the bits of the packet's mark that mask selects with those of mark.
func (f *Frame) SetVerdictWithMark(verdict Verdict, mark, mask uint32) error {
	i := f.inspector
	_, err := i.use(func() C.int {
		return C.towpath_go_verdict_mark(i.handle, f.ticket, C.uint32_t(verdict), C.uint32_t(mark), C.uint32_t(mask))
	})
	return err
}

// SetVerdictUpTo decides all frames up to this one on the same lane (one per engine thread) that are neither decided nor held. Not with
// Hold.
func (f *Frame) SetVerdictUpTo(verdict Verdict) error {
	i := f.inspector
	_, err := i.use(func() C.int { return C.towpath_go_verdict_upto(i.handle, f.ticket, C.uint32_t(verdict)) })
	return err
}

// Replace passes the frame with another payload, which is copied and includes the link header. It waits while the ring to the engine is
// full. [syscall.EMSGSIZE]: larger than the engine accepts. The frame remains undecided if it fails.
func (f *Frame) Replace(payload []byte) error {
	i := f.inspector
	_, err := i.use(func() C.int {
		return C.towpath_go_replace(i.handle, f.ticket, unsafe.Pointer(unsafe.SliceData(payload)), C.size_t(len(payload)))
	})
	return err
}

// SetVerdictAll decides all frames received so far that are neither decided nor held. Not with Hold.
func (i *Inspector) SetVerdictAll(verdict Verdict) error {
	_, err := i.use(func() C.int { return C.towpath_inspector_verdict_all(i.handle, C.uint32_t(verdict)) })
	return err
}

// undecided has the frames that a callback has not decided, by id.
type undecided struct {
	sync.Mutex
	frames map[uint32]Frame
	next   uint32
}

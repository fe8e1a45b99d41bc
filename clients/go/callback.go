package towpath

import (
	"context"
	"io"
	"syscall"
	"time"
)

// Attribute describes a packet to a callback.
type Attribute struct {
	// PacketID identifies the packet in the calls of SetVerdict.
	PacketID uint32
	// Payload is the packet from its IP header on. It is valid as long as Payload of the Frame.
	Payload []byte
	// Timestamp is the time of arrival.
	Timestamp time.Time
	// Mark is the packet's mark.
	Mark uint32
	// CapLen is the length of the packet from its IP header on; Payload is shorter if the packet was truncated.
	CapLen uint32
	// UID and GID are 0: the engine does not know the sender of a packet.
	UID, GID uint32
	// Frame has the other fields. It is valid during the call.
	Frame *Frame
}

// Register calls fn for each packet until the context ends, the engine ends the channel, or fn or errfn returns a value other than 0.
// It returns the context's error if the context has ended, and nil otherwise.
//
// fn decides a packet with SetVerdict or a similar method, during the call or later, from any goroutine and in any order. A packet that has
// no verdict when fn returns is held. errfn is called with errors of receiving; a value of 0 makes Register receive again.
func (i *Inspector) Register(ctx context.Context, fn func(Attribute) int, errfn func(error) int) error {
	frames := make([]Frame, 64)
	for {
		count, err := i.Recv(ctx, frames)
		switch {
		case err == io.EOF:
			return nil
		case err != nil && ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			if errfn(err) != 0 {
				return nil
			}
			continue
		}
		for n := range frames[:count] {
			if i.deliver(&frames[n], fn) != 0 {
				return nil
			}
		}
	}
}

// deliver calls fn for a frame.
func (i *Inspector) deliver(frame *Frame, fn func(Attribute) int) int {
	if frame.Kind == Gap {
		frame.SetVerdict(Pass)
		return 0
	}
	i.undecided.Lock()
	if i.undecided.frames == nil {
		i.undecided.frames = make(map[uint32]Frame)
	}
	i.undecided.next++
	id := i.undecided.next
	// Bounded by the slots of the ring: the engine sends no more frames until some are decided.
	i.undecided.frames[id] = *frame
	i.undecided.Unlock()
	network := min(int(frame.Network), len(frame.Payload))
	result := fn(Attribute{
		PacketID:  id,
		Payload:   frame.Payload[network:],
		Timestamp: frame.Time,
		Mark:      frame.Mark,
		CapLen:    frame.WireLen - uint32(network),
		UID:       frame.UID,
		GID:       frame.GID,
		Frame:     frame,
	})
	i.undecided.Lock()
	defer i.undecided.Unlock()
	if _, undecided := i.undecided.frames[id]; undecided {
		// SetVerdict fails if fn has decided the frame itself. The id is then unknown.
		if frame.SetVerdict(Hold) != nil {
			delete(i.undecided.frames, id)
		}
	}
	return result
}

// decide calls verdict with the frame of an id. [syscall.ENOENT]: the packet has a verdict, or the id is unknown.
func (i *Inspector) decide(id uint32, verdict func(*Frame) error) error {
	i.undecided.Lock()
	defer i.undecided.Unlock()
	frame, ok := i.undecided.frames[id]
	if !ok {
		return syscall.ENOENT
	}
	if err := verdict(&frame); err != nil {
		return err
	}
	delete(i.undecided.frames, id)
	return nil
}

// SetVerdict decides a packet of Register.
func (i *Inspector) SetVerdict(id uint32, verdict Verdict) error {
	return i.decide(id, func(frame *Frame) error { return frame.SetVerdict(verdict) })
}

// SetVerdictWithMark decides a packet of Register and sets its mark.
func (i *Inspector) SetVerdictWithMark(id uint32, verdict Verdict, mark uint32) error {
	return i.decide(id, func(frame *Frame) error { return frame.SetVerdictWithMark(verdict, mark, ^uint32(0)) })
}

// SetVerdictModPacket passes a packet of Register with other bytes from its IP header on.
func (i *Inspector) SetVerdictModPacket(id uint32, packet []byte) error {
	return i.decide(id, func(frame *Frame) error {
		network := min(int(frame.Network), len(frame.Payload))
		return frame.Replace(append(append(make([]byte, 0, network+len(packet)), frame.Payload[:network]...), packet...))
	})
}

// SetVerdictBatch decides all packets of Register with ids up to id that have no verdict.
func (i *Inspector) SetVerdictBatch(id uint32, verdict Verdict) error {
	i.undecided.Lock()
	defer i.undecided.Unlock()
	found := false
	for known, frame := range i.undecided.frames {
		// Ids wrap around after 2^32 packets.
		if int32(known-id) > 0 {
			continue
		}
		if err := frame.SetVerdict(verdict); err != nil {
			return err
		}
		delete(i.undecided.frames, known)
		found = true
	}
	if !found {
		return syscall.ENOENT
	}
	return nil
}

// Package towpath is the client of Towpath, a network data plane for Linux user space: inspectors, which receive the packets of a rule's
// queue and return verdicts, and workers, which answer the messages of a multiplexor's connections.
//
// An [Inspector] corresponds to a program that reads an NFQUEUE:
//
//	inspector, err := towpath.AttachInspector(towpath.InspectorConfig{})
//	if err != nil {
//		log.Fatal(err)
//	}
//	defer inspector.Close()
//	frames := make([]towpath.Frame, 64)
//	for {
//		n, err := inspector.Recv(ctx, frames)
//		if err == io.EOF {
//			break
//		}
//		if err != nil {
//			log.Fatal(err)
//		}
//		for i := range frames[:n] {
//			frames[i].SetVerdict(towpath.Pass)
//		}
//	}
//
// [Inspector.Register] is the same with a callback and packet ids, for programs that were written for a Go package for NFQUEUE.
// A [Worker] receives messages with Recv, or answers them with [Worker.Serve].
//
// The package needs cgo and libtowpath (crates/towpath-capi/install PREFIX). Below a PREFIX other than /usr and /usr/local, set CGO_CFLAGS
// to -IPREFIX/include and CGO_LDFLAGS to "-LPREFIX/lib -Wl,-rpath,PREFIX/lib".
//
// The methods of an inspector or a worker may be called by several goroutines at a time, and Close may be called while another method waits.
package towpath

/*
#cgo LDFLAGS: -ltowpath

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <towpath.h>

// Waits until the channel or the wake-up descriptor is readable, and clears the latter.
static int towpath_go_wait(int channel, int wake)
{
	struct pollfd fds[2] = {{.fd = channel, .events = POLLIN}, {.fd = wake, .events = POLLIN}};
	uint64_t count;
	while (poll(fds, 2, -1) < 0)
		if (errno != EINTR)
			return -errno;
	if (fds[1].revents != 0 && read(wake, &count, sizeof count) < 0 && errno != EAGAIN)
		return -errno;
	return 0;
}

static int towpath_go_eventfd(void)
{
	int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return fd < 0 ? -errno : fd;
}

// Fails only if the counter is full; then the descriptor is readable.
static void towpath_go_wake(int fd)
{
	uint64_t one = 1;
	if (write(fd, &one, sizeof one) < 0)
		return;
}
*/
import "C"

import (
	"context"
	"errors"
	"io"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
)

// Error is a failed call of libtowpath. [errors.Is] compares it with a [syscall.Errno].
type Error struct {
	Errno   syscall.Errno
	Message string
}

func (e *Error) Error() string { return "towpath: " + e.Message }

// Unwrap returns the errno(3) number.
func (e *Error) Unwrap() error { return e.Errno }

// Version returns the version of libtowpath.
func Version() string { return C.GoString(C.towpath_version()) }

// call runs a function of libtowpath, and repeats it after EINTR. It locks the thread, because the message of an error belongs to it.
func call(function func() C.int) (int, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for {
		result := function()
		if result >= 0 {
			return int(result), nil
		}
		if errno := syscall.Errno(-result); errno != syscall.EINTR {
			return 0, &Error{errno, C.GoString(C.towpath_error())}
		}
	}
}

// channel is the common part of inspectors and workers: a handle that one thread may use at a time, and waits that a context ends.
type channel struct {
	// functions of the handle
	arm, disarm, flush func() C.int
	fd                 C.int
	wake               C.int
	// receiving is held by the goroutine that receives.
	receiving sync.Mutex
	// using is held during each call with the handle.
	using sync.Mutex
	// freed and asleep are guarded by using. asleep: a goroutine waits, so each verdict needs a flush.
	freed, asleep bool
	// closing ends waits and fails calls, before the handle is freed.
	closing atomic.Bool
}

func (c *channel) start(fd C.int) error {
	c.fd = fd
	c.wake = C.towpath_go_eventfd()
	if c.wake < 0 {
		return os.NewSyscallError("eventfd", syscall.Errno(-c.wake))
	}
	return nil
}

// use runs a function with the handle, and wakes the other side if this one waits.
func (c *channel) use(function func() C.int) (int, error) {
	c.using.Lock()
	defer c.using.Unlock()
	if c.closing.Load() {
		return 0, os.ErrClosed
	}
	result, err := call(function)
	if err == nil && c.asleep {
		_, err = call(c.flush)
	}
	return result, err
}

// receive repeats a call that never waits until its result is not EAGAIN. It returns [io.EOF] if the result is 0.
func (c *channel) receive(ctx context.Context, function func() C.int) (int, error) {
	c.receiving.Lock()
	defer c.receiving.Unlock()
	for {
		count, err := c.use(function)
		if err == nil && count == 0 {
			return 0, io.EOF
		}
		if !errors.Is(err, syscall.EAGAIN) {
			return count, err
		}
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		if err := c.wait(ctx); err != nil {
			return 0, err
		}
	}
}

// wait waits until the channel is readable, the context has ended, or the channel is being closed.
func (c *channel) wait(ctx context.Context) error {
	armed, err := c.sleep()
	if err != nil || !armed {
		return err
	}
	stop := context.AfterFunc(ctx, c.interrupt)
	waited := C.towpath_go_wait(c.fd, c.wake)
	// The context's wake-up may arrive after this wait. The next wait then returns early, and receive waits again.
	stop()
	c.using.Lock()
	defer c.using.Unlock()
	c.asleep = false
	if waited < 0 {
		return os.NewSyscallError("poll", syscall.Errno(-waited))
	}
	_, err = call(c.disarm)
	return err
}

// sleep announces a wait. Returns false if something is pending.
func (c *channel) sleep() (bool, error) {
	c.using.Lock()
	defer c.using.Unlock()
	if c.closing.Load() {
		return false, os.ErrClosed
	}
	armed, err := call(c.arm)
	c.asleep = armed == 1
	return c.asleep, err
}

// interrupt ends a wait.
func (c *channel) interrupt() {
	c.using.Lock()
	defer c.using.Unlock()
	if !c.freed {
		C.towpath_go_wake(c.wake)
	}
}

// close ends waits, and calls the function that frees the handle, once.
func (c *channel) close(free func()) error {
	if c.closing.Swap(true) {
		return os.ErrClosed
	}
	c.interrupt()
	// A goroutine that receives holds the lock until its wait has ended.
	c.receiving.Lock()
	defer c.receiving.Unlock()
	c.using.Lock()
	defer c.using.Unlock()
	c.freed = true
	free()
	C.close(c.wake)
	return nil
}

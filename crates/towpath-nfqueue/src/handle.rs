//! Handles, queues and verdicts: `nfq_open` to `nfq_close`.
//!
//! A handle has the program's socket and, from its first queue on, a pump. Configuration calls are calls of this library, not messages:
//! their effect is immediate. The callbacks run in `nfq_handle_packet`, without a lock, so that they may call every function.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;

use crate::data::{self, Attributes, nfqa};
use crate::ffi::{guard, guard_or};
use crate::message::{self, HEADERS};
use crate::pump::{self, Shared};
use crate::queue::{self, Queue, Woken};
use crate::{lock, nfnl, place, socket};

/// `struct nfq_handle`.
#[derive(Debug)]
pub struct Handle {
    socket: OwnedFd,
    /// The descriptor that the program uses: that of `socket`, or that of the handle that it passed to `nfq_open_nfnl`.
    descriptor: RawFd,
    nfnl: Mutex<Option<Nfnl>>,
    shared: Arc<Shared>,
    callbacks: Mutex<Vec<Callback>>,
    /// The pump was started.
    pumped: Mutex<bool>,
    /// The packet whose callback runs: 1, queue and id, or 0 without one.
    current: AtomicU64,
}

/// libnfnetlink's handle, until `nfq_close`.
#[derive(Debug)]
struct Nfnl(nfnl::Handle);

// SAFETY: this library only passes the pointer to libnfnetlink, under the lock.
unsafe impl Send for Nfnl {}

/// `struct nfq_q_handle`.
#[derive(Debug)]
pub struct QueueHandle {
    handle: Arc<Handle>,
    queue: Arc<Queue>,
}

/// `nfq_callback`: queue, `struct nfgenmsg`, packet, and the program's pointer.
type Function =
    unsafe extern "C" fn(*mut QueueHandle, *mut c_void, *mut Attributes<'_>, *mut c_void) -> c_int;

/// The callback of a queue.
#[derive(Clone, Copy, Debug)]
struct Callback {
    number: u16,
    queue: *mut QueueHandle,
    function: Option<Function>,
    data: *mut c_void,
}

// SAFETY: the pointers are the program's, which calls `nfq_handle_packet` in a thread of its choice.
unsafe impl Send for Callback {}

thread_local! {
    /// The last payload that was in the ring. As the program's buffer, it stays until the thread handles the next messages.
    static PAYLOADS: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Bit of [`Handle::current`] above the number of the queue.
const CURRENT: u64 = 1 << 16;

/// Bytes of the message that a kernel's verdict would take: header and verdict, mark, and header of the payload.
const VERDICT: usize = HEADERS + 12;
const MARK: usize = 8;
const PAYLOAD: usize = 4;

/// Opens a handle.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_open() -> *const Handle {
    guard_or(std::ptr::null(), || open(None))
}

/// Opens a handle over a handle of libnfnetlink, whose descriptor becomes the handle's socket.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_open_nfnl(nfnlh: *mut c_void) -> *const Handle {
    guard_or(std::ptr::null(), || open(Some(NonNull::new(nfnlh).ok_or(Errno::INVAL)?)))
}

fn open(nfnlh: Option<nfnl::Handle>) -> Result<*const Handle, Errno> {
    let (socket, sender) = socket::pair()?;
    let descriptor = match nfnlh {
        Some(handle) => nfnl::redirect(handle, socket.as_fd())?,
        None => socket.as_raw_fd(),
    };
    Ok(Arc::into_raw(Arc::new(Handle {
        socket,
        descriptor,
        nfnl: Mutex::new(nfnlh.map(Nfnl)),
        shared: Arc::new(Shared::new(sender)?),
        callbacks: Mutex::default(),
        pumped: Mutex::new(false),
        current: AtomicU64::new(0),
    })))
}

/// Closes a handle, its queues and its socket. Packets without a verdict go to another program of the queue, or get its default verdict.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_close(handle: *const Handle) -> c_int {
    guard(|| {
        if handle.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the pointer is one of `open`, and the program does not use it any more.
        let handle = unsafe { Arc::from_raw(handle) };
        for callback in lock(&handle.callbacks).drain(..) {
            // SAFETY: a queue that `nfq_create_queue` made and that was not destroyed.
            unsafe { Box::from_raw(callback.queue) }.queue.close();
        }
        handle.shared.stop();
        if let Some(Nfnl(nfnl)) = lock(&handle.nfnl).take() {
            nfnl::close(nfnl);
        }
        Ok(0)
    })
}

/// Returns a handle of libnfnetlink with the same socket: for `nfnl_fd` and `nfnl_rcvbufsiz`. NULL without libnfnetlink.so.0.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_nfnlh(handle: Option<&Handle>) -> *mut c_void {
    guard_or(null_mut(), || {
        let handle = handle.ok_or(Errno::INVAL)?;
        let mut nfnl = lock(&handle.nfnl);
        if nfnl.is_none() {
            *nfnl = Some(Nfnl(nfnl::open(handle.socket.as_fd())?));
        }
        Ok(nfnl.as_ref().map_or(null_mut(), |Nfnl(nfnl)| nfnl.as_ptr()))
    })
}

/// Returns the descriptor of the socket.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_fd(handle: Option<&Handle>) -> c_int {
    guard(|| Ok(handle.ok_or(Errno::INVAL)?.descriptor))
}

/// Has no effect, as in the kernel since Linux 3.8.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_bind_pf(handle: Option<&Handle>, _pf: u16) -> c_int {
    guard(|| handle.map(|_| 0).ok_or(Errno::INVAL))
}

/// Has no effect, as in the kernel since Linux 3.8.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_unbind_pf(handle: Option<&Handle>, _pf: u16) -> c_int {
    guard(|| handle.map(|_| 0).ok_or(Errno::INVAL))
}

/// Attaches to the engine's queue `number`. ENOENT if no engine has it; EPERM if the engine does not permit this user; EBUSY if the handle
/// has the queue already.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_create_queue(
    handle: *const Handle,
    number: u16,
    function: Option<Function>,
    data: *mut c_void,
) -> *mut QueueHandle {
    guard_or(null_mut(), || {
        if handle.is_null() {
            return Err(Errno::INVAL);
        }
        let handle = share(handle);
        if lock(&handle.callbacks).iter().any(|callback| callback.number == number) {
            return Err(Errno::BUSY);
        }
        let path = place::socket_of(number).ok_or_else(|| {
            debug(format_args!("queue {number}: TOWPATH_NFQUEUE does not name it"));
            Errno::NOENT
        })?;
        let queue = Queue::attach(number, path, Arc::as_ptr(&handle).addr()).map_err(|error| {
            debug(format_args!("queue {number}: {error}"));
            queue::errno(&error)
        })?;
        let queue = Arc::new(queue);
        let mut pumped = lock(&handle.pumped);
        if !*pumped {
            pump::start(Arc::clone(&handle.shared))?;
            *pumped = true;
        }
        drop(pumped);
        let pointer =
            Box::into_raw(Box::new(QueueHandle { handle: Arc::clone(&handle), queue: Arc::clone(&queue) }));
        lock(&handle.callbacks).push(Callback { number, queue: pointer, function, data });
        handle.shared.add(queue);
        Ok(pointer)
    })
}

/// A reference to the program's handle, which is not NULL.
fn share(handle: *const Handle) -> Arc<Handle> {
    // SAFETY: the pointer is one of `open`; the handle exists until `nfq_close`.
    unsafe { Arc::increment_strong_count(handle) };
    // SAFETY: as above; this is the reference that was just counted.
    unsafe { Arc::from_raw(handle) }
}

/// One line to standard error if `TOWPATH_NFQUEUE_DEBUG` is set.
fn debug(text: std::fmt::Arguments<'_>) {
    if std::env::var_os("TOWPATH_NFQUEUE_DEBUG").is_some() {
        // Written at once, so that lines of several processes do not mix. Without standard error, the line is lost.
        let line = format!("libnetfilter_queue (towpath): {text}\n");
        let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
    }
}

/// Detaches from a queue.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_destroy_queue(queue: *mut QueueHandle) -> c_int {
    guard(|| {
        if queue.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the pointer is one of `nfq_create_queue`, and the program does not use it any more.
        let of = unsafe { Box::from_raw(queue) };
        lock(&of.handle.callbacks).retain(|callback| callback.queue != queue);
        // A callback destroys its queue: its message is no more in the socket.
        let current = of.handle.current.load(Ordering::Relaxed);
        if current >> 32 == CURRENT | u64::from(of.queue.number) {
            of.queue.handles(current as u32);
        }
        of.queue.close();
        of.handle.shared.remove(&of.queue);
        Ok(0)
    })
}

/// Calls the callback of each packet in `length` bytes from the socket. Returns -1 if a callback returned a negative number, or if the
/// program has no such queue. The other packets of the datagram are handled in any case: the kernel has one packet per datagram.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_handle_packet(handle: *const Handle, buffer: *mut c_char, length: c_int) -> c_int {
    guard(|| {
        if handle.is_null() || buffer.is_null() {
            return Err(Errno::INVAL);
        }
        // The handle lives until the loop ends: a callback may close it, as with the kernel, which has one packet per datagram.
        let handle = share(handle);
        let handle = &*handle;
        let length = usize::try_from(length).map_err(|_| Errno::INVAL)?;
        // SAFETY: the program passes a buffer of this length. Only its callbacks write to it, through `nfq_get_payload`.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), length) };
        // A callback may call this function.
        let mut payload = PAYLOADS.take();
        let mut result = 0;
        let mut last = None;
        for message in message::messages(bytes).filter(|message| message.kind == message::PACKET) {
            let Some(packet) = Packet::parse(message.body) else { return Ok(-1) };
            last = Some((packet.queue, packet.id));
            let current = (CURRENT | u64::from(packet.queue)) << 32 | u64::from(packet.id);
            // Relaxed: read by this thread, in a callback.
            handle.current.store(current, Ordering::Relaxed);
            if packet.call_back(handle, &mut payload) < 0 {
                result = -1;
            }
        }
        PAYLOADS.set(payload);
        handle.current.store(0, Ordering::Relaxed);
        if let Some((number, id)) = last
            && let Some(queue) = handle.shared.queue(number)
            && queue.handled(id)
        {
            handle.shared.limit(length);
        }
        Ok(result)
    })
}

/// A message for a callback.
struct Packet<'a> {
    queue: u16,
    id: u32,
    in_ring: bool,
    genmsg: &'a [u8; 4],
    attributes: Attributes<'a>,
}

impl<'a> Packet<'a> {
    fn parse(body: &'a [u8]) -> Option<Self> {
        let (genmsg, attributes) = body.split_first_chunk::<4>()?;
        let all = attributes;
        let attributes = Attributes::parse(all);
        let in_ring = attributes.get(nfqa::PAYLOAD).is_none()
            && data::attributes(all).any(|attribute| attribute.kind == nfqa::PAYLOAD_IN_RING);
        let id = u32::from_be_bytes(*attributes.get(nfqa::PACKET_HDR)?.first_chunk()?);
        Some(Self { queue: u16::from_be_bytes([genmsg[2], genmsg[3]]), id, in_ring, genmsg, attributes })
    }

    /// Calls the callback. `payload` is memory for a payload that is in the ring. A packet that the program does not have any more has no
    /// callback then: it has no payload.
    fn call_back(mut self, handle: &Handle, payload: &'a mut Vec<u8>) -> c_int {
        let find = |callback: &&Callback| callback.number == self.queue;
        let callback = lock(&handle.callbacks).iter().find(find).copied();
        let Some(Callback { queue, function: Some(function), data, .. }) = callback else {
            queue::parked::missed(std::ptr::from_ref(handle).addr(), self.queue, self.id);
            return -1;
        };
        if self.in_ring {
            let queue = handle.shared.queue(self.queue);
            if !queue.is_some_and(|queue| queue.copy_payload(self.id, payload)) {
                return 0;
            }
            self.attributes.set_payload(payload);
        }
        // SAFETY: the program's function, with the arguments of `nfq_callback`. The attributes live during the call.
        unsafe { function(queue, self.genmsg.as_ptr().cast_mut().cast(), &raw mut self.attributes, data) }
    }
}

/// Sets what the program gets of each packet: nothing (0; packets are dropped), metadata (1), or `range` bytes of it, too (2).
#[unsafe(no_mangle)]
pub extern "C" fn nfq_set_mode(queue: Option<&QueueHandle>, mode: u8, range: c_uint) -> c_int {
    configure(queue, |queue| queue.set_mode(mode, range))
}

/// Sets the `NFQA_CFG_F_` flags in `mask`.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_set_queue_flags(queue: Option<&QueueHandle>, mask: u32, flags: u32) -> c_int {
    configure(queue, |queue| queue.set_flags(mask, flags))
}

/// Sets the number of packets without a verdict that the program has at most.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_set_queue_maxlen(queue: Option<&QueueHandle>, maxlen: u32) -> c_int {
    configure(queue, |queue| {
        queue.set_maxlen(maxlen);
        Ok(())
    })
}

fn configure(queue: Option<&QueueHandle>, set: impl FnOnce(&Queue) -> Result<(), Errno>) -> c_int {
    guard(|| {
        let of = queue.ok_or(Errno::INVAL)?;
        set(&of.queue)?;
        of.handle.shared.wake();
        Ok(0)
    })
}

/// Gives a verdict, with a changed packet if `length` is not 0. ENOENT if the program does not have the packet, EINVAL for NF_STOLEN.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_set_verdict(
    queue: Option<&QueueHandle>,
    id: u32,
    verdict: u32,
    length: u32,
    payload: *const c_uchar,
) -> c_int {
    decide(queue, id, verdict, None, (payload, length))
}

/// Gives a verdict and sets the packet's mark.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_set_verdict2(
    queue: Option<&QueueHandle>,
    id: u32,
    verdict: u32,
    mark: u32,
    length: u32,
    payload: *const c_uchar,
) -> c_int {
    decide(queue, id, verdict, Some(mark), (payload, length))
}

/// Gives a verdict and sets the packet's mark, which is in network byte order. Deprecated.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_set_verdict_mark(
    queue: Option<&QueueHandle>,
    id: u32,
    verdict: u32,
    mark: u32,
    length: u32,
    payload: *const c_uchar,
) -> c_int {
    decide(queue, id, verdict, Some(u32::from_be(mark)), (payload, length))
}

fn decide(
    queue: Option<&QueueHandle>,
    id: u32,
    verdict: u32,
    mark: Option<u32>,
    (payload, length): (*const c_uchar, u32),
) -> c_int {
    guard(|| {
        let of = queue.ok_or(Errno::INVAL)?;
        let payload = match length {
            0 => None,
            _ if payload.is_null() => return Err(Errno::FAULT),
            // SAFETY: the program passes `length` bytes that do not change during the call.
            _ => Some(unsafe { std::slice::from_raw_parts(payload, length as usize) }),
        };
        of.wake_if(of.queue.verdict(id, verdict, mark, payload)?);
        let sent = VERDICT + mark.map_or(0, |_| MARK) + payload.map_or(0, |payload| PAYLOAD + payload.len());
        Ok(c_int::try_from(sent).unwrap_or(c_int::MAX))
    })
}

/// Gives a verdict for all packets of the queue up to `id`.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_set_verdict_batch(queue: Option<&QueueHandle>, id: u32, verdict: u32) -> c_int {
    decide_upto(queue, id, verdict, None)
}

/// Gives a verdict for all packets of the queue up to `id`, and sets their mark.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_set_verdict_batch2(
    queue: Option<&QueueHandle>,
    id: u32,
    verdict: u32,
    mark: u32,
) -> c_int {
    decide_upto(queue, id, verdict, Some(mark))
}

fn decide_upto(queue: Option<&QueueHandle>, id: u32, verdict: u32, mark: Option<u32>) -> c_int {
    guard(|| {
        let of = queue.ok_or(Errno::INVAL)?;
        of.wake_if(of.queue.verdict_upto(id, verdict, mark)?);
        Ok((VERDICT + mark.map_or(0, |_| MARK)) as c_int)
    })
}

impl QueueHandle {
    /// Wakes the pump if the queue receives packets again.
    fn wake_if(&self, Woken(woken): Woken) {
        if woken {
            self.handle.shared.wake();
        }
    }
}

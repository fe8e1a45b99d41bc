//! The ingress hook of kernels without tcx links: a filter of the qdisc `clsact` (tc-bpf(8)).
//!
//! Such a filter stays on its interface when the process that attached it ends. The program of a port with `fail = "open"` therefore
//! reads a heartbeat: a word of shared memory with the time at which a thread of the process last ran. It lets all packets pass once the
//! heartbeat is a second old.
//!
//! Formats: linux/pkt_sched.h, linux/pkt_cls.h.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

use crate::claim::Claim;
use crate::kernel_path;
use crate::mapping::Mapping;
use crate::rtnetlink::{attributes, change, dump_with, find, put, word};
use crate::sys;

/// linux/rtnetlink.h, linux/netlink.h.
const RTM_NEWQDISC: u16 = 36;
const RTM_NEWTFILTER: u16 = 44;
const RTM_DELTFILTER: u16 = 45;
const RTM_GETTFILTER: u16 = 46;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_EXCL: u16 = 0x200;
const NLM_F_CREATE: u16 = 0x400;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
/// linux/pkt_sched.h: the parent of the qdisc, its handle, and the parent of its filters for incoming packets.
const TC_H_CLSACT: u32 = 0xffff_fff1;
const CLSACT: u32 = 0xffff_0000;
const INGRESS: u32 = 0xffff_fff2;
/// linux/pkt_cls.h.
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
const TCA_BPF_ID: u16 = 11;
const TCA_BPF_FLAG_ACT_DIRECT: u32 = 1;
/// The first filter of the hook, for all protocols (linux/if_ether.h, ETH_P_ALL).
const PREFERENCE: u32 = 1 << 16;
const ETH_P_ALL: u16 = 3;
const HANDLE: u32 = 1;
/// The name of the engine's filter.
const NAME: &[u8] = b"towpath\0";

/// The time between two heartbeats: a fifth of [`SILENCE`](crate::host_filter::SILENCE).
const PERIOD: Duration = Duration::from_millis(200);
/// A mapping has whole pages.
const PAGE: usize = 4096;

/// A filter that is attached to an interface. Dropping it ends its heartbeat, and removes it where the process may do so.
#[derive(Debug)]
pub(crate) struct Attached {
    index: u32,
    /// Number of the program.
    program: u32,
    /// The filter stays when the port ends (fail closed).
    closed: bool,
    _heartbeat: Heartbeat,
}

impl Attached {
    /// Takes over the filter on the interface `index`, and keeps up its heartbeat in `memory`.
    pub(crate) fn of(index: u32, memory: Mapping, closed: bool) -> io::Result<Self> {
        let program = program_on(index)?.ok_or(io::Error::from_raw_os_error(libc::ENODEV))?;
        Ok(Self { index, program, closed, _heartbeat: Heartbeat::start(memory)? })
    }

    /// Returns true if the filter is attached to the interface `index`.
    pub(crate) fn is_on(&self, index: u32) -> bool {
        self.index == index && program_on(index).is_ok_and(|program| program == Some(self.program))
    }
}

/// Set by [`on_beat`].
static EACH: OnceLock<fn() -> bool> = OnceLock::new();

/// Calls `each` on the thread of a heartbeat before it begins and at each beat. The thread may start before the process restricts its
/// threads: `each` restricts it afterwards, and returns true from then on. A thread that begins restricted keeps the capabilities of the
/// thread that starts it, because it may not change them. A second call has no effect.
pub fn on_beat(each: fn() -> bool) {
    let _ = EACH.set(each);
}

fn is_restricted() -> bool {
    EACH.get().is_some_and(|each| each())
}

/// A heartbeat of this process.
#[derive(Debug)]
struct Heartbeat {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Heartbeat {
    fn start(memory: Mapping) -> io::Result<Self> {
        let ends = Arc::new(AtomicBool::new(false));
        let end = Arc::clone(&ends);
        let beat = move || {
            // Each thread has its own capabilities. This one may start before the others give theirs up.
            if !is_restricted() {
                let none = CapabilitySet::empty();
                let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
                let _ = set_capabilities(None, sets);
            }
            let word = memory.word();
            // Relaxed: independent of other memory; unpark(3) synchronizes with the end.
            while !end.load(Ordering::Relaxed) {
                word.store(now(), Ordering::Relaxed);
                is_restricted();
                thread::park_timeout(PERIOD);
            }
            word.store(0, Ordering::Relaxed);
        };
        let thread = thread::Builder::new().name("heartbeat".into()).spawn(beat)?;
        Ok(Self { ends, thread: Some(thread) })
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// The time of CLOCK_MONOTONIC in nanoseconds, as bpf_ktime_get_ns(7) has it.
fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

/// A map for a heartbeat, with the first beat.
pub(crate) fn heartbeat() -> io::Result<OwnedFd> {
    let map = sys::bpf_shared_word()?;
    memory(map.as_fd())?.word().store(now(), Ordering::Relaxed);
    Ok(map)
}

/// The memory of a heartbeat's map. Other BPF objects cannot be mapped.
pub(crate) fn memory(map: BorrowedFd<'_>) -> io::Result<Mapping> {
    Mapping::of(map, PAGE, 0)
}

/// Attaches a program to the interface `index`, in place of that of an earlier engine.
///
/// # Errors
/// `EEXIST` if another program's filter has the first place of the hook.
pub(crate) fn attach(index: u32, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut qdisc = message(index, CLSACT, TC_H_CLSACT, 0);
    put(&mut qdisc, TCA_KIND, b"clsact\0");
    match change(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_EXCL, &qdisc) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let flags = if is_on(index)? { NLM_F_REPLACE } else { NLM_F_EXCL };
    let mut options = Vec::new();
    put(&mut options, TCA_BPF_FD, &program.as_raw_fd().to_ne_bytes());
    put(&mut options, TCA_BPF_NAME, NAME);
    put(&mut options, TCA_BPF_FLAGS, &TCA_BPF_FLAG_ACT_DIRECT.to_ne_bytes());
    let mut filter = message(index, HANDLE, INGRESS, info());
    put(&mut filter, TCA_KIND, b"bpf\0");
    put(&mut filter, TCA_OPTIONS, &options);
    change(RTM_NEWTFILTER, NLM_F_CREATE | flags, &filter)
}

/// Removes the engine's filter from the interface `index`.
pub(crate) fn remove(index: u32) -> io::Result<()> {
    let mut filter = message(index, HANDLE, INGRESS, info());
    put(&mut filter, TCA_KIND, b"bpf\0");
    change(RTM_DELTFILTER, 0, &filter)
}

/// Returns true if a filter of an engine is on the interface `index`.
fn is_on(index: u32) -> io::Result<bool> {
    Ok(program_on(index)?.is_some())
}

/// The number of the program of the engine's filter on the interface `index`. Needs no privilege.
fn program_on(index: u32) -> io::Result<Option<u32>> {
    let mut found = None;
    dump_with(RTM_GETTFILTER, &message(index, 0, INGRESS, 0), |kind, body| {
        // struct tcmsg: the handle is at 8, the information at 16.
        let Some([handle, own]) = (|| Some([word(body.get(8..)?)?, word(body.get(16..)?)?]))() else {
            return;
        };
        let all = attributes(body.get(20..).unwrap_or(&[]));
        let options = find(&all, TCA_OPTIONS).map(attributes).unwrap_or_default();
        if kind == RTM_NEWTFILTER
            && (handle, own) == (HANDLE, info())
            && find(&options, TCA_BPF_NAME) == Some(NAME)
        {
            found = find(&options, TCA_BPF_ID).and_then(word);
        }
    })?;
    Ok(found)
}

fn info() -> u32 {
    PREFERENCE | u32::from(ETH_P_ALL.to_be())
}

/// struct tcmsg: family, interface, handle, parent, information.
fn message(index: u32, handle: u32, parent: u32, info: u32) -> Vec<u8> {
    [0, index, handle, parent, info].iter().flat_map(|word| word.to_ne_bytes()).collect()
}

impl Drop for Attached {
    fn drop(&mut self) {
        // The program of a later engine stays. A process without the privilege leaves a program without a heartbeat.
        if !self.closed && self.is_on(self.index) {
            let _ = remove(self.index);
        }
    }
}

/// An engine's filter on an interface that no engine has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Abandoned {
    /// The name of the interface.
    pub interface: String,
    index: u32,
}

impl Abandoned {
    /// All of this network namespace.
    pub fn all() -> Vec<Self> {
        let Ok(names) = kernel_path::interface_names() else { return Vec::new() };
        let abandoned = |(index, interface): (u32, String)| {
            let found = is_on(index).unwrap_or(false) && !Claim::is_taken(&format!("`{interface}`"));
            found.then_some(Self { interface, index })
        };
        names.into_iter().filter_map(abandoned).collect()
    }

    /// Removes it.
    ///
    /// # Errors
    /// Errors of rtnetlink(7): the process needs CAP_NET_ADMIN.
    pub fn remove(&self) -> io::Result<()> {
        remove(self.index)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::netns::until;

    #[test]
    fn the_thread_of_a_heartbeat_calls_the_process() {
        static CALLS: AtomicU32 = AtomicU32::new(0);
        on_beat(|| {
            CALLS.fetch_add(1, Ordering::Relaxed);
            false
        });
        let file = memfd_create("heartbeat", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, PAGE as u64).unwrap();
        let memory = || Mapping::of(file.as_fd(), PAGE, 0).unwrap();
        let heartbeat = Heartbeat::start(memory()).unwrap();
        // The start, and a beat.
        until(|| CALLS.load(Ordering::Relaxed) > 2 && memory().word().load(Ordering::Relaxed) > 0);
        drop(heartbeat);
        assert_eq!(memory().word().load(Ordering::Relaxed), 0);
    }
}

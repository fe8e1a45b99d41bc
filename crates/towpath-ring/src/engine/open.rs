//! Creation of a channel: the memory of every lane, sent to a client that may attach.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::engine::channel::{Channel, ClientPolicy};
use crate::engine::control_rx::ControlRx;
use crate::engine::endpoint::Config;
use crate::engine::oneshots::OneShots;
use crate::engine::peer_liveness::PeerLiveness;
use crate::engine::quota::Charge;
use crate::engine::rings::{First, Rings};
use crate::engine::stats::ChannelStats;
use crate::handshake::messages::{Hello, Offer, Reply, Terms, Welcome};
use crate::lane::loss_record::LossRecords;
use crate::reaper::Reaped;
use crate::shm::abi::{self, VERSION};
use crate::shm::header::Credentials;
use crate::shm::park::{Answered, Ringer, Sleeper};
use crate::shm::seq::Seq;
use crate::shm::sys::{self, Sent};

/// Creates the memory of each lane, seals it and sends it to the client.
pub(crate) fn open(
    config: &Config,
    socket: &Reaped<OwnedFd>,
    peer: Credentials,
    hello: &Hello,
    charge: Charge,
) -> std::io::Result<Channel> {
    let teardown = socket.teardown();
    let pidfd = sys::pidfd(peer.pid);
    let layout = config.layout();
    let first = First { rx: Seq::begin(), tx: Seq::begin() };
    let made = (0..config.lanes).map(|_| Rings::make(config, layout, first, teardown));
    let made = made.collect::<std::io::Result<Vec<_>>>()?;
    let mut sockets = vec![teardown.wrap(socket.try_clone()?)];

    let terms = Terms {
        layout,
        lanes: config.lanes,
        oneshot_max: config.oneshot_max,
        replacement_max: config.replacement_max,
        fences: hello.fences,
        messages: config.messages,
    };
    let welcome = Welcome { version: VERSION, answer: Reply::Attached(terms) };
    let (mut lanes, mut lent) = (Vec::with_capacity(made.len()), Some(Vec::new()));
    for (lane, (rings, memory)) in (0..).zip(made) {
        // The first lane comes with the welcome and uses the attached socket.
        if lane == 0 {
            hand_over(socket, &welcome.emit(), &memory.fds())?;
            charge.lend(None);
        } else {
            let (ours, theirs) = sys::pair()?;
            let mut fds = memory.fds().to_vec();
            fds.push(theirs.as_fd());
            hand_over(socket, &Offer { lane, layout }.emit(), &fds)?;
            sockets.push(teardown.wrap(ours));
        }
        lent = lent.zip(memory.lent()).map(|(mut all, lent)| {
            all.extend(lent);
            all
        });
        lanes.push(rings);
    }
    charge.lend(lent);

    let answered = Answered::default();
    let liveness =
        PeerLiveness::new(sockets.into(), peer, pidfd, hello.name.clone(), charge, teardown.clone());
    let liveness = Arc::new(liveness);
    let policy = ClientPolicy {
        events: hello.events,
        parts: hello.parts,
        violations_max: config.violations_max,
        overdue_max: config.overdue_max,
        messages: config.messages,
    };
    let mut channels = Vec::with_capacity(lanes.len());
    for (lane, rings) in (0..).zip(lanes) {
        let socket = teardown.wrap(liveness.socket(lane).try_clone()?);
        channels.push(Channel {
            lane,
            rings,
            control: ControlRx::new(socket, config.quota.descriptors, config.oneshot_max),
            sleeper: Sleeper::new(abi::ENGINE_NEED_WAKEUP, hello.fences),
            ringer: Ringer::new(abi::CLIENT_NEED_WAKEUP, hello.fences, answered.clone()),
            oneshots: OneShots::new(config.oneshot_max),
            policy,
            dump: None,
            gaps: LossRecords::new(hello.gaps),
            checked: 0,
            stats: ChannelStats::default(),
            lost: 0,
            others: Vec::new(),
            armed: None,
            liveness: liveness.clone(),
        });
    }
    let others = channels.split_off(1);
    let mut channel = channels.pop().ok_or(std::io::ErrorKind::InvalidInput)?;
    channel.others = others;
    Ok(channel)
}

fn hand_over(socket: &OwnedFd, message: &[u8], fds: &[BorrowedFd<'_>]) -> std::io::Result<()> {
    match sys::send(socket, message, fds)? {
        Sent::Yes => Ok(()),
        // A client that has just connected has an empty socket buffer; otherwise it is not a ring client.
        Sent::Full | Sent::Gone => Err(std::io::ErrorKind::BrokenPipe.into()),
    }
}

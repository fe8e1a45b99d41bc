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
use crate::shm::abi::{self, VERSION};
use crate::shm::header::Credentials;
use crate::shm::park::{Answered, Ringer, Sleeper};
use crate::shm::seq::Seq;
use crate::shm::sys::{self, Sent};

/// Creates the memory of each lane, seals it and sends it to the client.
pub(crate) fn open(
    config: &Config,
    socket: &OwnedFd,
    peer: Credentials,
    hello: &Hello,
    charge: Charge,
) -> std::io::Result<Channel> {
    let pidfd = sys::pidfd(peer.pid);
    let layout = config.layout();
    let first = First { rx: Seq::begin(), tx: Seq::begin() };
    let made = (0..config.lanes).map(|_| Rings::make(config, layout, first));
    let made = made.collect::<std::io::Result<Vec<_>>>()?;
    let mut sockets = vec![socket.try_clone()?];

    let terms = Terms {
        layout,
        lanes: config.lanes,
        oneshot_max: config.oneshot_max,
        replacement_max: config.replacement_max,
        fences: hello.fences,
    };
    let welcome = Welcome { version: VERSION, answer: Reply::Attached(terms) };
    let mut memory = made.iter().map(|(.., memory)| memory);
    // The first lane comes with the welcome and uses the attached socket.
    let first = memory.next().ok_or(std::io::ErrorKind::InvalidInput)?;
    hand_over(socket, &welcome.emit(), &first.fds())?;
    charge.lend();
    for (lane, memory) in (1..).zip(memory) {
        let (ours, theirs) = sys::pair()?;
        let mut fds = memory.fds().to_vec();
        fds.push(theirs.as_fd());
        hand_over(socket, &Offer { lane, layout }.emit(), &fds)?;
        sockets.push(ours);
    }

    let answered = Answered::default();
    let liveness = PeerLiveness::new(sockets.into(), peer, pidfd, hello.name.clone(), charge);
    let liveness = Arc::new(liveness);
    let policy = ClientPolicy {
        violations_max: config.violations_max,
        overdue_max: config.overdue_max,
        messages: config.messages,
    };
    let mut lanes = Vec::with_capacity(made.len());
    for (lane, (rings, _)) in (0..).zip(made) {
        let socket = liveness.socket(lane).try_clone()?;
        lanes.push(Channel {
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
            liveness: liveness.clone(),
        });
    }
    let others = lanes.split_off(1);
    let mut channel = lanes.pop().ok_or(std::io::ErrorKind::InvalidInput)?;
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

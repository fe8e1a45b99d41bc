use super::*;
use crate::conformance::{self, Shape, Wire};
use crate::interface::exists;
use crate::netns::{ip, patiently, until, within};
use crate::{LinkType, af_packet};

/// A wire between the two sides of a TUN or TAP interface: the port, and a packet socket on the host's interface.
struct Sides<T, R> {
    tx: T,
    rx: R,
    link: LinkType,
}

impl<T: Port + 'static, R: Port + 'static> Wire for Sides<T, R> {
    fn shape(&self) -> Shape {
        Shape { link: self.link, longest: 9000, recorded: false }
    }

    fn tx(&mut self) -> &mut dyn Port {
        &mut self.tx
    }

    fn into_rx(self: Box<Self>) -> Box<dyn Port> {
        // The sending end keeps the interface alive, so it is dropped after the receiver (fields drop in declaration order).
        Box::new(Both { rx: self.rx, _tx: self.tx })
    }
}

/// The receiving end. It keeps the sending end open.
struct Both<T, R> {
    rx: R,
    _tx: T,
}

impl<T: Port, R: Port> Port for Both<T, R> {
    fn name(&self) -> &str {
        self.rx.name()
    }

    fn caps(&self) -> Caps {
        self.rx.caps()
    }

    fn receive(&mut self, burst: &mut Burst) -> Result<Received, Error> {
        self.rx.receive(burst)
    }

    fn send<'a>(&mut self, frames: &mut dyn Iterator<Item = Frame<'a>>) -> Result<usize, Error> {
        self.rx.send(frames)
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        self.rx.poll_fd()
    }

    fn take_refused(&mut self, each: &mut dyn FnMut(TxDrop, &[u8])) {
        self.rx.take_refused(each);
    }

    fn stats(&mut self) -> Stats {
        self.rx.stats()
    }
}

fn sides(config: Config) -> (Device, af_packet::Socket, LinkType) {
    let mut device = patiently(|| Device::open(config.clone())).unwrap();
    ip("link set t0 mtu 9000");
    until(|| device.state().unwrap() == State::Up);
    let vnet_hdr = device.config.vnet_hdr;
    // One block per frame: the kernel's timer may close a block after each frame.
    let (block_size, blocks) = (128 << 10, conformance::FRAMES as u32);
    let machine = af_packet::Config { block_size, blocks, vnet_hdr, ..af_packet::Config::new("t0") };
    let link = device.config.link();
    (device, af_packet::Socket::open(machine).unwrap(), link)
}

#[towpath_testenv::needs(netns, tun)]
#[test]
fn conforms() {
    for config in [Config::tun("t0"), Config::tap("t0")] {
        for vnet_hdr in [false, true] {
            let config = Config { vnet_hdr, ..config.clone() };
            within(|| {
                conformance::check(|| {
                    let (rx, tx, link) = sides(config.clone());
                    Box::new(Sides { tx, rx, link })
                });
                conformance::check(|| {
                    let (tx, rx, link) = sides(config.clone());
                    Box::new(Sides { tx, rx, link })
                });
            });
        }
    }
}

#[towpath_testenv::needs(netns, tun)]
#[test]
fn an_interface_goes_down_is_deleted_and_is_made_again() {
    within(|| {
        let (mut device, _, _) = sides(Config::tun("t0"));
        let bytes = [0x45, 0, 0, 20, 0, 0, 0, 0, 64, 59, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        let once = || std::iter::once(Frame::new(&bytes, LinkType::RAW));
        ip("link set t0 down");
        until(|| device.state().unwrap() == State::Down);
        assert_eq!(device.send(&mut once()).unwrap(), 1);
        assert_eq!(device.stats().port_down, 1);
        ip("link del t0");
        assert_eq!(device.state().unwrap(), State::Gone);
        assert_eq!(device.receive(&mut Burst::new(4)).unwrap(), Received::Nothing);
        assert_eq!(device.send(&mut once()).unwrap(), 1);
        patiently(|| device.reopen()).unwrap();
        until(|| device.state().unwrap() == State::Up);
        device.send(&mut once()).unwrap();
        assert_eq!((device.stats().sent, device.stats().port_down), (1, 2));
    });
}

#[towpath_testenv::needs(netns, tun)]
#[test]
fn queues_share_an_interface() {
    within(|| {
        let (device, _, _) = sides(Config::tun("t0"));
        drop(device);
        let mut queues = patiently(|| Device::open_queues(&Config::tun("t0"), 2)).unwrap();
        ip("addr add 10.1.0.1/24 dev t0");
        let sockets: Vec<_> = (0..64).map(|_| std::net::UdpSocket::bind("10.1.0.1:0").unwrap()).collect();
        sockets.iter().for_each(|socket| {
            socket.send_to(b"hello", "10.1.0.2:9").unwrap();
        });
        let mut burst = Burst::new(64);
        let mut counts = [0; 2];
        until(|| {
            for (count, queue) in counts.iter_mut().zip(&mut queues) {
                let _ = queue.receive(&mut burst).unwrap();
                *count += burst.len();
            }
            counts.iter().sum::<usize>() >= 64
        });
        assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    });
}

#[towpath_testenv::needs(netns, tun)]
#[test]
fn errors_say_what_to_do() {
    within(|| {
        let (device, _, _) = sides(Config::tun("t0"));
        #[rustfmt::skip]
        let rows = [
            (Config::tun("t0"),                                        "another process has this interface"),
            (Config::tap("t0"),                                        "of this name and another kind"),
            (Config::tun("a-name-that-is-too-long"),                   "at most 15 characters"),
            (Config { node: "/dev/none".into(), ..Config::tun("t1") }, "modprobe tun"),
        ];
        for (config, expected) in rows {
            let error = Device::open(config).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        drop(device);
    });
}

/// Multi-queue for two threads: the engine's side has two queues in both directions.
#[towpath_testenv::needs(netns, tun)]
#[test]
fn two_queues_conform() {
    for config in [Config::tun("t0"), Config::tap("t0")] {
        within(|| {
            let open = || {
                // A forked child of another test may still have descriptors of the last wire. The interface then exists, and would give
                // some of the frames to those queues.
                until(|| !exists("t0"));
                let queues = patiently(|| {
                    crate::driver::DriverConfig::open(&config, "t0", 2, &Opener::local(&config))
                });
                let mut queues = queues.unwrap();
                until(|| queues[0].state().unwrap() == State::Up);
                let (block_size, blocks) = (128 << 10, conformance::FRAMES as u32);
                let machine = af_packet::Config { block_size, blocks, ..af_packet::Config::new("t0") };
                let machine: Vec<Box<dyn Port>> = vec![Box::new(af_packet::Socket::open(machine).unwrap())];
                (queues, machine, Shape { link: config.link(), longest: 1500, recorded: false })
            };
            conformance::check(|| {
                let (rx, tx, shape) = open();
                Box::new(conformance::QueuesWire { tx, rx, shape })
            });
            conformance::check(|| {
                let (tx, rx, shape) = open();
                Box::new(conformance::QueuesWire { tx, rx, shape })
            });
        });
    }
}

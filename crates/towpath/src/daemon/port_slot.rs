//! Opens the ports of a configuration.

use towpath_port::{Error, Port, af_packet, af_xdp, nfqueue, pcap, tun};

use super::capture_port::CapturePort;
use super::named_port::NamedPort;
use crate::config::{self, Driver};

/// Opens a port once for each engine thread.
///
/// # Errors
///
/// The driver's error, with the remedy.
pub(super) fn open(port: &config::Port, threads: usize) -> Result<Vec<Box<dyn Port>>, Error> {
    let name = &port.name;
    match &port.driver {
        Driver::AfPacket { interface, offload } => {
            // PACKET_FANOUT hashes both directions of a connection to the same thread. The group id includes the process id, so that
            // two engines on one interface do not share packets by accident.
            let mut fanout = (threads > 1).then_some(af_packet::Fanout::HashAlone);
            let socket = |thread| {
                let config = af_packet::Config {
                    vnet_hdr: *offload,
                    fanout,
                    queue: thread as u16,
                    ..af_packet::Config::new(interface)
                };
                let socket = af_packet::Socket::open(config)?;
                fanout = socket.fanout();
                Ok(named(name, socket))
            };
            (0..threads).map(socket).collect()
        }
        Driver::AfXdp { interface, native, zero_copy, multi_buffer, closed } => {
            let pin = || format!("/sys/fs/bpf/towpath-{interface}").into();
            let config = af_xdp::Config {
                mode: if *native { af_xdp::Mode::Native } else { af_xdp::Mode::Skb },
                zero_copy: *zero_copy,
                multi_buffer: multi_buffer.unwrap_or(true),
                after: if *closed { af_xdp::After::Drop(pin()) } else { af_xdp::After::Pass },
                ..af_xdp::Config::new(interface)
            };
            let sockets = match af_xdp::Socket::open_queues(&config, threads as u32) {
                Err(Error::Unsupported { .. }) if multi_buffer.is_none() => {
                    let config = af_xdp::Config { multi_buffer: false, ..config };
                    let sockets = af_xdp::Socket::open_queues(&config, threads as u32)?;
                    log::warn!(
                        "{name}: this kernel or `{interface}` does not support multi-buffer XDP; hosts on this machine \
                         must not offload segmentation: run `ethtool -K DEV tso off gso off` there"
                    );
                    sockets
                }
                sockets => sockets?,
            };
            Ok(sockets.into_iter().map(|socket| named(name, socket)).collect())
        }
        Driver::Tun { device, tap, offload } => {
            let config = if *tap { tun::Config::tap(device) } else { tun::Config::tun(device) };
            let config = tun::Config { vnet_hdr: *offload, ..config };
            if threads == 1 {
                return Ok(vec![named(name, tun::Device::open(config)?)]);
            }
            let devices = tun::Device::open_queues(&config, threads as u16)?;
            Ok(devices.into_iter().map(|device| named(name, device)).collect())
        }
        driver @ (Driver::Nfqueue { .. } | Driver::Pcap { .. }) if threads > 1 => Err(Error::Config {
            name: name.clone(),
            what: format!("{} ports support one thread only: set [engine] threads = 1", driver.word()),
        }),
        &Driver::Nfqueue { queue, fail_open, copy_range, gso } => {
            let config =
                nfqueue::Config { fail_open, copy_range, gso, replies: true, ..nfqueue::Config::new(queue) };
            let queue = nfqueue::Queue::open(config)?;
            if !queue.caps().send {
                log::warn!("{name}: without CAP_NET_RAW a reject drops the packet and sends no reply");
            }
            Ok(vec![named(name, queue)])
        }
        Driver::Pcap { read, write } => {
            let reader = read.as_ref().map(pcap::Reader::open).transpose()?;
            let writer = write.as_ref().map(pcap::Writer::create).transpose()?;
            Ok(vec![named(name, CapturePort::new(reader, writer))])
        }
    }
}

fn named(name: &str, port: impl Port + 'static) -> Box<dyn Port> {
    Box::new(NamedPort::new(name, port))
}

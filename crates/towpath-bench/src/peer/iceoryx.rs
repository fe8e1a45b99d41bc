//! iceoryx2: lossless publish-subscribe in shared memory (the publisher waits for space).

use std::hint::{black_box, spin_loop};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use iceoryx2::port::backpressure_strategy::BackpressureStrategy;
use iceoryx2::port::publisher::Publisher;
use iceoryx2::port::subscriber::Subscriber;
use iceoryx2::prelude::*;
use iceoryx2::service::port_factory::publish_subscribe::PortFactory;

use crate::payload::fold;
use crate::pin::{self, Cpus};
use crate::raw::say;
use crate::side::Side;
use crate::stat::median;

type Factory = PortFactory<ipc::Service, [u8], ()>;
type Sender = Publisher<ipc::Service, [u8], ()>;
type Receiver = Subscriber<ipc::Service, [u8], ()>;

/// Length of the message that ends a measurement.
const END: usize = 1;
const BUFFER: usize = 1024;

/// Returns the messages per second of `len` bytes, loaned, filled and sent one at a time.
pub(crate) fn rate(cpus: Cpus, time: Duration, len: usize, read: bool) -> Result<f64> {
    let name = format!("towpath-bench/{}/rate", std::process::id());
    let node = node()?;
    let service = service(&node, &name)?;
    let publisher = publisher(&service, len)?;
    let words = [
        "iceoryx-rate".to_owned(),
        name,
        if read { "read" } else { "look" }.to_owned(),
        cpus.consumer.to_string(),
    ];
    let mut side = Side::start(&words, &[])?;
    side.line()?;
    pin::to(cpus.engine)?;
    let message = vec![7; len];
    let start = Instant::now();
    while start.elapsed() < time {
        for _ in 0..256 {
            send(&publisher, &message)?;
        }
    }
    send(&publisher, &message[..END])?;
    let rate = side.number()?;
    side.finish()?;
    Ok(rate)
}

pub(crate) fn rate_side(name: &str, read: bool, cpu: usize) -> Result<()> {
    pin::to(cpu)?;
    let node = node()?;
    let service = service(&node, name)?;
    let subscriber = subscriber(&service)?;
    say("ready")?;
    let mut count = 0_u64;
    let mut start = Instant::now();
    loop {
        let Some(sample) = subscriber.receive().map_err(|e| anyhow!("receiving from iceoryx2: {e}"))? else {
            spin_loop();
            continue;
        };
        if count == 0 {
            start = Instant::now();
        }
        match sample.payload() {
            end if end.len() == END => break,
            payload if read => drop(black_box(fold(payload))),
            payload => drop(black_box(payload[0] ^ payload[payload.len() - 1])),
        }
        count += 1;
    }
    say(&(count as f64 / start.elapsed().as_secs_f64()).to_string())
}

/// Round trip over two services, with both sides spinning: median in ns.
pub(crate) fn round_trip(cpus: Cpus, time: Duration, len: usize) -> Result<f64> {
    let names = ["ping", "pong"].map(|way| format!("towpath-bench/{}/{way}", std::process::id()));
    let node = node()?;
    let (ping, pong) = (service(&node, &names[0])?, service(&node, &names[1])?);
    let (publisher, subscriber) = (publisher(&ping, len)?, subscriber(&pong)?);
    let [ping, pong] = names;
    let mut side = Side::start(
        &["iceoryx-echo".to_owned(), ping, pong, len.to_string(), cpus.consumer.to_string()],
        &[],
    )?;
    side.line()?;
    pin::to(cpus.engine)?;
    let message = vec![7; len];
    let mut trips = Vec::with_capacity(1 << 20);
    let start = Instant::now();
    while start.elapsed() < time {
        let sent = Instant::now();
        send(&publisher, &message)?;
        wait(&subscriber)?;
        trips.push(sent.elapsed().as_nanos() as f64);
    }
    send(&publisher, &message[..END])?;
    side.finish()?;
    Ok(median(&trips))
}

pub(crate) fn echo_side(ping: &str, pong: &str, len: usize, cpu: usize) -> Result<()> {
    pin::to(cpu)?;
    let node = node()?;
    let (ping, pong) = (service(&node, ping)?, service(&node, pong)?);
    let (subscriber, publisher) = (subscriber(&ping)?, publisher(&pong, len)?);
    let message = vec![7; len];
    say("ready")?;
    while wait(&subscriber)? != END {
        send(&publisher, &message)?;
    }
    Ok(())
}

fn node() -> Result<Node<ipc::Service>> {
    set_log_level(LogLevel::Error);
    NodeBuilder::new().create::<ipc::Service>().map_err(|e| anyhow!("making an iceoryx2 node: {e}"))
}

fn service(node: &Node<ipc::Service>, name: &str) -> Result<Factory> {
    let name = name.try_into().map_err(|e| anyhow!("iceoryx2 refuses the name {name}: {e:?}"))?;
    node.service_builder(&name)
        .publish_subscribe::<[u8]>()
        .enable_safe_overflow(false)
        .subscriber_max_buffer_size(BUFFER)
        .history_size(0)
        .max_publishers(1)
        .max_subscribers(1)
        .subscriber_max_borrowed_samples(64)
        .open_or_create()
        .map_err(|e| anyhow!("opening the iceoryx2 service: {e}"))
}

fn publisher(service: &Factory, len: usize) -> Result<Sender> {
    service
        .publisher_builder()
        .initial_max_slice_len(len)
        .max_loaned_samples(64)
        .backpressure_strategy(BackpressureStrategy::RetryUntilDelivered)
        .create()
        .map_err(|e| anyhow!("making an iceoryx2 publisher: {e}"))
}

fn subscriber(service: &Factory) -> Result<Receiver> {
    let builder = service.subscriber_builder().buffer_size(BUFFER);
    builder.create().map_err(|e| anyhow!("making an iceoryx2 subscriber: {e}"))
}

fn send(publisher: &Sender, message: &[u8]) -> Result<()> {
    let loan = publisher.loan_slice_uninit(message.len()).map_err(|e| anyhow!("an iceoryx2 loan: {e}"))?;
    let receivers = loan.write_from_slice(message).send().map_err(|e| anyhow!("sending by iceoryx2: {e}"))?;
    anyhow::ensure!(receivers == 1, "iceoryx2 delivered to {receivers} subscribers");
    Ok(())
}

/// Waits for the next message and returns its length.
fn wait(subscriber: &Receiver) -> Result<usize> {
    loop {
        if let Some(sample) = subscriber.receive().map_err(|e| anyhow!("receiving from iceoryx2: {e}"))? {
            black_box(fold(sample.payload()));
            return Ok(sample.payload().len());
        }
    }
}

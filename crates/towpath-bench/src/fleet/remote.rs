//! Workers on other machines: a round trip to one over nats-server(1) on loopback, NATS's own request and reply, and the work from which a
//! remote worker is worth it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use async_nats::Client;
use futures_util::StreamExt;
use rustix::process::{Pid, Signal, kill_process};

use super::server::Server;
use crate::side::Side;
use crate::stat::median;
use crate::subject::replay::binary;

/// Bytes of a message, with the four of its length.
const LEN: usize = 64;

/// Time without measurement at the beginning.
const WARM: Duration = Duration::from_millis(300);

/// Maximum time for a worker to be there.
const READY: Duration = Duration::from_secs(20);

/// Connections that each have one message outstanding, while a rate is measured.
const CONNECTIONS: usize = 2;

/// The share of a local worker's rate from which a remote worker is worth it.
const WORTH: f64 = 0.8;

/// Work per message in microseconds.
const WORK: [u64; 8] = [50, 100, 200, 350, 500, 800, 1200, 2000];

/// `towpath mux` with one worker, local or on a worker host. Ends when it is dropped.
struct Setup {
    address: SocketAddr,
    processes: Vec<Child>,
}

impl Drop for Setup {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = kill_process(Pid::from_child(process), Signal::KILL);
            let _ = process.wait();
        }
    }
}

impl Setup {
    /// With `server`, the worker is remote. It works for `micros` per message.
    fn start(server: Option<&Server>, micros: u64) -> Result<Self> {
        let own = std::env::current_exe().context("finding this program")?;
        let worker = format!("{} side fleet-worker {micros}", own.display());
        let mut front = Command::new(binary()?);
        front.args(["mux", "127.0.0.1:0", "--framing", "length=4 be adjust=4", "--drain", "1"]);
        let url = server.map(|server| format!("nats://127.0.0.1:{}", server.port));
        match &url {
            Some(url) => front.args(["--remote", "bench", "--nats", url, "--remote-workers", "1"]),
            None => front.args(["--workers", "1", "--worker", &worker]),
        };
        let mut front = front.stderr(Stdio::piped()).spawn().context("starting towpath mux")?;
        let stderr = front.stderr.take().context("no standard error")?;
        let mut setup = Self { address: ([127, 0, 0, 1], 0).into(), processes: vec![front] };
        if let Some(url) = &url {
            let mut host = Command::new(binary()?);
            host.args(["worker", "--subject", "bench", "--workers", "1", "--exec", &worker, "--nats", url]);
            setup.processes.push(host.stderr(Stdio::null()).spawn().context("starting towpath worker")?);
        }
        let mut lines = BufReader::new(stderr).lines();
        let line = lines.next().context("towpath mux ended early; build it with --features fleet")??;
        let address = line.strip_prefix("listening on ").with_context(|| line.clone())?;
        setup.address = address.parse().with_context(|| line.clone())?;
        // Its further lines must not block it.
        thread::spawn(move || lines.for_each(drop));
        Ok(setup)
    }

    fn connect(&self) -> Result<TcpStream> {
        let stream = TcpStream::connect(self.address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(READY))?;
        Ok(stream)
    }
}

/// One message and its answer.
fn ask(stream: &mut TcpStream) -> Result<()> {
    let mut message = [7; LEN];
    message[..4].copy_from_slice(&(LEN as u32 - 4).to_be_bytes());
    stream.write_all(&message)?;
    stream.read_exact(&mut message).context("no worker answers")
}

/// The median of round trips during `time`, in microseconds.
fn trips(time: Duration, mut trip: impl FnMut() -> Result<()>) -> Result<f64> {
    let begun = Instant::now();
    while begun.elapsed() < WARM {
        trip()?;
    }
    let (begun, mut micros) = (Instant::now(), Vec::new());
    while begun.elapsed() < time {
        let before = Instant::now();
        trip()?;
        micros.push(before.elapsed().as_secs_f64() * 1e6);
    }
    ensure!(micros.len() >= 100, "{} round trips only", micros.len());
    Ok(median(&micros))
}

/// A client's round trip through `towpath mux` to a remote worker, in microseconds.
pub(crate) fn round_trip(time: Duration) -> Result<f64> {
    let server = Server::start()?;
    let setup = Setup::start(Some(&server), 0)?;
    let mut stream = setup.connect()?;
    trips(time, || ask(&mut stream))
}

/// A round trip of NATS's request and reply, between two processes with the same client library, in microseconds.
pub(crate) fn request_reply(time: Duration) -> Result<f64> {
    let server = Server::start()?;
    let mut side = Side::start(&["fleet-responder".to_owned(), server.port.to_string()], &[])?;
    side.line()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let client = runtime.block_on(connect(server.port))?;
    let payload = bytes::Bytes::from(vec![7; LEN]);
    trips(time, || {
        let reply = runtime.block_on(client.request("bench", payload.clone())).context("no reply")?;
        ensure!(reply.payload.len() == LEN, "a wrong reply");
        Ok(())
    })
}

async fn connect(port: u16) -> Result<Client> {
    async_nats::connect(format!("nats://127.0.0.1:{port}")).await.context("connecting to nats-server")
}

/// Answers requests with their bytes.
pub(crate) fn responder(port: u16) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let client = connect(port).await?;
        let mut requests = client.subscribe("bench").await?;
        client.flush().await?;
        println!("ready");
        while let Some(request) = requests.next().await {
            if let Some(reply) = request.reply {
                client.publish(reply, request.payload).await?;
            }
        }
        bail!("the server has ended")
    })
}

/// A worker that waits for `micros` per message and answers with its bytes.
pub(crate) fn worker(micros: u64) -> Result<()> {
    // Otherwise, a sleep takes 50 us longer.
    rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1))?;
    let mut worker = towpath_ring::Worker::attach_env()?;
    Ok(worker.serve(|message, answer| {
        if micros > 0 {
            thread::sleep(Duration::from_micros(micros));
        }
        answer.extend_from_slice(message.bytes());
    })?)
}

/// The work per message, in microseconds, from which a remote worker completes [`WORTH`] of the messages that a local one completes.
pub(crate) fn crossing(time: Duration) -> Result<f64> {
    let server = Server::start()?;
    let each = time / 4;
    let mut before: Option<(f64, f64)> = None;
    for micros in WORK {
        let (remote, local) = (rate(Some(&server), micros, each)?, rate(None, micros, each)?);
        let share = remote / local;
        eprintln!("{micros} us of work: {remote:.0} messages a second, {local:.0} of a local worker");
        let work = micros as f64;
        if share >= WORTH {
            return Ok(match before {
                Some((less, low)) => less + (work - less) * (WORTH - low) / (share - low),
                None => work,
            });
        }
        before = Some((work, share));
    }
    bail!("a remote worker completes less than {WORTH} of a local one's messages also with {WORK:?} us")
}

/// Messages a second of one worker with [`CONNECTIONS`] outstanding.
fn rate(server: Option<&Server>, micros: u64, time: Duration) -> Result<f64> {
    let setup = Setup::start(server, micros)?;
    let clients: Vec<_> = (0..CONNECTIONS)
        .map(|_| {
            let mut stream = setup.connect()?;
            Ok(thread::spawn(move || -> Result<f64> {
                let begun = Instant::now();
                while begun.elapsed() < WARM {
                    ask(&mut stream)?;
                }
                let (begun, mut count) = (Instant::now(), 0);
                while begun.elapsed() < time {
                    ask(&mut stream)?;
                    count += 1;
                }
                Ok(f64::from(count) / begun.elapsed().as_secs_f64())
            }))
        })
        .collect::<Result<_>>()?;
    let rates =
        clients.into_iter().map(|client| client.join().map_err(|_| anyhow::anyhow!("a client panicked"))?);
    rates.sum()
}

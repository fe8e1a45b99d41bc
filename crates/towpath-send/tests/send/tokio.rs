//! Tests of the tokio sender.
#![cfg(feature = "tokio")]

use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use towpath_send::{AsyncSender, Options, PlainCause, Pool, SendError};

const PATIENCE: Duration = Duration::from_secs(60);

fn options() -> Options {
    Options { tamper_check: true, gather: Options::default().gather, ..crate::checked::zerocopy() }
}

pub(crate) async fn pair() -> (std::net::TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    (stream.into_std().unwrap(), listener.accept().await.unwrap().0)
}

#[tokio::test]
async fn data_arrives_and_frames_return() {
    let (stream, mut peer) = pair().await;
    let mut sender = AsyncSender::new(stream, Options { max_frames: 8, ..options() }).unwrap();
    let mut pool = Pool::new(10, 200_000, true).unwrap();
    let reader = tokio::spawn(async move {
        let mut all = Vec::new();
        peer.read_to_end(&mut all).await.map(|_| all)
    });
    let mut expected = Vec::new();
    for n in 0..200_u8 {
        let mut frame = pool.take().expect("more frames than max_frames");
        frame.put(&vec![n; 1000 * usize::from(n)]);
        expected.extend_from_slice(&frame);
        sender.queue(n.into(), frame).await.unwrap();
    }
    let closed = sender.close(PATIENCE).await.unwrap();
    assert!(closed.finished);
    assert_eq!(closed.counters.completed, closed.counters.numbers);
    assert!(closed.counters.numbers > 0 && closed.counters.tampered == 0);
    assert!(reader.await.unwrap().unwrap() == expected);
}

/// Borrowed writes and queued buffers keep their order, while another task reads.
#[tokio::test]
async fn it_is_a_stream_with_two_halves() {
    let (stream, peer) = pair().await;
    let mut sender = AsyncSender::new(stream, options()).unwrap();
    let (mut from, mut to) = tokio::io::split(peer);
    let echo = tokio::spawn(async move {
        let copied = tokio::io::copy(&mut from, &mut to).await.unwrap();
        to.shutdown().await.unwrap();
        copied
    });
    let mut expected = Vec::new();
    for n in 0..20_u8 {
        sender.queue(0, vec![n; 300_000]).await.unwrap();
        let written = [n + 100; 70_000];
        let slices = [
            std::io::IoSlice::new(&written[..10]),
            std::io::IoSlice::new(&[]),
            std::io::IoSlice::new(&written[10..]),
        ];
        let bytes = sender.write_vectored(&slices).await.unwrap();
        assert!(bytes > 0 && sender.is_write_vectored());
        sender.write_all(&written[bytes..]).await.unwrap();
        expected.extend([vec![n; 300_000], written.to_vec()].concat());
        let mut back = vec![0; 370_000];
        sender.read_exact(&mut back).await.unwrap();
        assert!(expected.ends_with(&back), "round {n}");
    }
    assert_eq!(sender.counters().plain_for(PlainCause::Borrowed), 20 * 70_000);
    assert_eq!(sender.counters().zerocopy_bytes, 20 * 300_000);
    let (mut read, mut write) = tokio::io::split(sender);
    let writer = tokio::spawn(async move {
        for n in 0..100_u8 {
            write.write_all(&vec![n; 100_000]).await.unwrap();
        }
        write.shutdown().await.unwrap();
    });
    let mut all = Vec::new();
    read.read_to_end(&mut all).await.unwrap();
    writer.await.unwrap();
    assert!(all == (0..100_u8).flat_map(|n| vec![n; 100_000]).collect::<Vec<_>>());
    assert_eq!(echo.await.unwrap(), 20 * 370_000 + 10_000_000);
}

/// HTTP/1.1 and HTTP/2 of hyper, with a sender at both ends.
#[tokio::test]
async fn hyper_runs_over_it() {
    for http2 in [false, true] {
        let (client, server) = pair().await;
        let [client, server] = [client, server.into_std().unwrap()]
            .map(|stream| TokioIo::new(AsyncSender::new(stream, Options::default()).unwrap()));
        let echo = service_fn(async |request: Request<Incoming>| {
            let body = request.into_body().collect().await.unwrap().to_bytes();
            Ok::<_, std::convert::Infallible>(Response::new(Full::new(body)))
        });
        let body = Bytes::from((0..3_000_000_u32).map(|n| (n / 7) as u8).collect::<Vec<_>>());
        let request = Request::post("http://localhost/echo").body(Full::new(body.clone())).unwrap();
        let ask = async {
            let response = if http2 {
                let (mut sender, connection) =
                    hyper::client::conn::http2::handshake(TokioExecutor::new(), client).await.unwrap();
                tokio::spawn(connection);
                sender.send_request(request).await.unwrap()
            } else {
                let (mut sender, connection) = hyper::client::conn::http1::handshake(client).await.unwrap();
                tokio::spawn(connection);
                sender.send_request(request).await.unwrap()
            };
            assert!(response.into_body().collect().await.unwrap().to_bytes() == body, "http2: {http2}");
        };
        let serve = async {
            if http2 {
                let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                builder.serve_connection(server, echo).await
            } else {
                hyper::server::conn::http1::Builder::new().serve_connection(server, echo).await
            }
        };
        // The server ends with the client, which may be gone before the server's last frame.
        let _ = tokio::join!(ask, serve);
    }
}

#[tokio::test]
async fn a_disconnect_is_an_error() {
    let (stream, mut peer) = pair().await;
    let mut sender = AsyncSender::new(stream, options()).unwrap();
    let peer = tokio::spawn(async move {
        let mut some = vec![0; 1 << 20];
        peer.read_exact(&mut some).await.map(drop)
    });
    let error = loop {
        if let Err(error) = sender.send(vec![1; 256 << 10]).await {
            break error;
        }
    };
    assert!(matches!(error, SendError::Gone(_)), "{error}");
    peer.await.unwrap().unwrap();
    assert!(!sender.close(PATIENCE).await.unwrap().finished);
}

/// Like the test of the blocking sender.
#[tokio::test]
async fn discarded_data_is_not_reported_as_sent() {
    for error_taken in [false, true] {
        let (stream, peer) = pair().await;
        let watched = stream.try_clone().unwrap();
        let mut sender = AsyncSender::new(stream, options()).unwrap();
        sender.queue(1, vec![7; 256 << 10]).await.unwrap();
        sender.flush().await.unwrap();
        rustix::net::sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
        drop(peer);
        let mut fds = [rustix::event::PollFd::new(&watched, rustix::event::PollFlags::empty())];
        while !fds[0].revents().contains(rustix::event::PollFlags::HUP) {
            rustix::event::poll(&mut fds, None).unwrap();
        }
        if error_taken {
            for _ in 0..2 {
                assert!(matches!(sender.drain().await, Err(SendError::Gone(_))));
            }
        }
        assert!(!sender.close(PATIENCE).await.unwrap().finished, "error_taken: {error_taken}");
    }
}

#[tokio::test]
async fn close_times_out_on_a_stalled_peer() {
    let (stream, peer) = pair().await;
    let mut sender = AsyncSender::new(stream, Options { keep_done: true, ..options() }).unwrap();
    for token in 0..100 {
        sender.queue(token, vec![1; 256 << 10]).await.unwrap();
    }
    let closed = sender.close(Duration::from_millis(10)).await.unwrap();
    assert!(!closed.finished);
    let remains = closed.remains;
    assert_eq!(remains.done.len() + remains.unsent.len() + remains.quarantine.len(), 100);
    drop(peer);
}

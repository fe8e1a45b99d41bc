//! Messages as a stream under tokio.

use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use futures_core::Stream;
use futures_sink::Sink;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use towpath_mux::io::{Messages, Reply, Server};
use towpath_mux::mux::{Config, Order};

fn server(config: Config) -> (Server, std::net::SocketAddr, Messages) {
    let server = Server::new("line".parse().expect("a framing"), config).expect("epoll");
    let address = server.listen("127.0.0.1:0").expect("a port");
    let messages = server.messages(8).expect("a runtime");
    (server, address, messages)
}

/// Echoes through the traits until the mux has drained. Returns the number of messages.
async fn echo(mut messages: Messages) -> usize {
    let mut count = 0;
    while let Some(message) = poll_fn(|cx| Pin::new(&mut messages).poll_next(cx)).await {
        let message = message.expect("epoll");
        poll_fn(|cx| Pin::new(&mut messages).poll_ready(cx)).await.expect("room");
        Pin::new(&mut messages)
            .start_send(Reply::to(&message, message.bytes().clone()))
            .expect("it is taken");
        count += 1;
    }
    count
}

#[tokio::test]
async fn many_clients_at_once() {
    const CLIENTS: usize = 20;
    const EACH: usize = 200;
    let (server, address, messages) = server(Config::new(Order::None));
    let echo = tokio::spawn(echo(messages));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            tokio::spawn(async move {
                let mut socket = TcpStream::connect(address).await.expect("it listens");
                let asked: String = (0..EACH).map(|number| format!("{client} {number}\n")).collect();
                let (mut read, mut write) = socket.split();
                let mut answer = vec![0; asked.len()];
                let (wrote, got) =
                    tokio::join!(write.write_all(asked.as_bytes()), read.read_exact(&mut answer));
                wrote.expect("it reads");
                got.expect("answers");
                assert_eq!(String::from_utf8(answer).expect("text"), asked);
            })
        })
        .collect();
    for client in clients {
        client.await.expect("its answers");
    }
    server.drain(None);
    assert_eq!(echo.await.expect("it does not panic"), CLIENTS * EACH);
    server.look(towpath_mux::mux::Mux::check).expect("it adds up");
}

/// Replies that the peer does not accept at once are sent later; messages without a reply are completed.
#[tokio::test]
async fn late_readers_and_messages_without_replies() {
    let (server, address, mut messages) = server(Config::new(Order::None));
    let work = tokio::spawn(async move {
        while let Some(message) = messages.recv().await? {
            let reply = match message.payload() {
                b"much" => Reply::to(&message, vec![b'x'; 8 << 20]),
                _ => Reply::none(&message),
            };
            messages.reply(reply).expect("it holds it");
            assert!(messages.reply(Reply::none(&message)).is_err(), "only once");
        }
        Ok::<_, std::io::Error>(())
    });
    let mut client = TcpStream::connect(address).await.expect("it listens");
    client.write_all(b"nothing\nmuch\n").await.expect("it reads");
    let mut answer = vec![0; 8 << 20];
    client.read_exact(&mut answer).await.expect("all of it");
    assert!(answer.iter().all(|byte| *byte == b'x'));
    server.drain(None);
    work.await.expect("it does not panic").expect("epoll");
}

/// Timers of the core run without traffic.
#[tokio::test]
async fn an_idle_connection_ends() {
    let config = Config { idle: Some(Duration::from_millis(20)), ..Config::new(Order::None) };
    let (server, address, messages) = server(config);
    let echo = tokio::spawn(echo(messages));
    let mut client = TcpStream::connect(address).await.expect("it listens");
    assert_eq!(client.read(&mut [0]).await.expect("an end"), 0);
    server.drain(None);
    assert_eq!(echo.await.expect("it does not panic"), 0);
}

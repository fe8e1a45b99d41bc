//! An HTTP server of hyper over `AsyncSender`.
//!
//! `cargo run -p towpath-send --features tokio --example http -- 127.0.0.1:8080`, then `curl http://127.0.0.1:8080/`
//!
//! Bytes that hyper writes are borrowed for one call, so the kernel copies them. `AsyncSender::queue` sends without a copy; code that
//! speaks its own protocol uses it for long bodies between two writes.

use std::convert::Infallible;
use std::error::Error;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use towpath_send::{AsyncSender, Options};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).ok_or("usage: http ADDRESS:PORT")?;
    let listener = TcpListener::bind(&address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    loop {
        let (stream, peer) = listener.accept().await?;
        let sender = AsyncSender::new(stream.into_std()?, Options::default())?;
        tokio::spawn(async move {
            let hello = service_fn(async |request: Request<Incoming>| {
                let text = format!("{} {}\n", request.method(), request.uri());
                Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(text))))
            });
            if let Err(error) = http1::Builder::new().serve_connection(TokioIo::new(sender), hello).await {
                eprintln!("{peer}: {error}");
            }
        });
    }
}

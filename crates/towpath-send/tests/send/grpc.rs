//! gRPC of tonic, with a tokio sender at both ends.
#![cfg(feature = "tokio")]

use bytes::{Buf, BufMut, Bytes};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::Endpoint;
use tonic::{Code, Request, Response, Status};
use towpath_send::{AsyncSender, Options};

/// Messages of bytes.
#[derive(Clone, Copy, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        into.put(message);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

/// Echoes a message; an empty one is an error.
async fn echo(request: Request<Bytes>) -> Result<Response<Bytes>, Status> {
    match request.into_inner() {
        empty if empty.is_empty() => Err(Status::invalid_argument("no bytes")),
        bytes => Ok(Response::new(bytes)),
    }
}

#[tokio::test]
async fn tonic_runs_over_it() {
    let (client, server) = crate::tokio::pair().await;
    let [client, server] = [client, server.into_std().unwrap()]
        .map(|stream| TokioIo::new(AsyncSender::new(stream, Options::default()).unwrap()));
    let serve = service_fn(async |request| {
        let answer = tonic::server::Grpc::new(Raw).unary(tower::service_fn(echo), request).await;
        Ok::<_, std::convert::Infallible>(answer)
    });
    let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    let serving = builder.serve_connection(server, serve);
    let asking = async {
        let mut client = Some(client);
        let connect = tower::service_fn(move |_| {
            std::future::ready(client.take().ok_or_else(|| std::io::Error::other("a second connection")))
        });
        let endpoint = Endpoint::from_static("http://localhost");
        let channel = endpoint.connect_with_connector(connect).await.unwrap();
        let mut grpc = tonic::client::Grpc::new(channel);
        let mut ask = async |message: Bytes| {
            grpc.ready().await.unwrap();
            let path = hyper::http::uri::PathAndQuery::from_static("/towpath.Test/Echo");
            grpc.unary(Request::new(message), path, Raw).await.map(Response::into_inner)
        };
        for length in [1, 70_000, 3_000_000] {
            let message = Bytes::from((0..length).map(|n| (n / 7) as u8).collect::<Vec<_>>());
            assert!(ask(message.clone()).await.unwrap() == message, "{length}");
        }
        let error = ask(Bytes::new()).await.unwrap_err();
        assert_eq!((error.code(), error.message()), (Code::InvalidArgument, "no bytes"));
    };
    // The server ends with the client, which may be gone before the server's last frame.
    let _ = tokio::join!(asking, serving);
}

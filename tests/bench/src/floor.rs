//! The floor: the least that a proxy of this kind can do. It adds the three fields of an SGLang rendezvous to the body, sends both legs and
//! relays the decode's answer; no choice, no limit, no metric, no error that a client could read.
//!
//! What lies between its cost and a gateway's is what the gateway adds. It is started as a peer is (see `--peer`).

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Either, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

type Failure = Box<dyn std::error::Error + Send + Sync>;
type Answer = Response<Either<Incoming, Full<Bytes>>>;

struct Pair {
    prefill: String,
    decode: String,
    /// `"bootstrap_host":…,"bootstrap_port":…,"bootstrap_room":`
    fields: String,
}

struct Floor {
    client: Client<HttpConnector, Full<Bytes>>,
    pairs: Vec<Pair>,
    served: AtomicUsize,
}

impl Floor {
    fn from_environment() -> Result<Self, Failure> {
        let list = |name: &str| -> Result<Vec<String>, Failure> {
            Ok(std::env::var(name)?.split_whitespace().map(str::to_owned).collect())
        };
        let legs = list("BENCH_PREFILL")?.into_iter().zip(list("BENCH_DECODE")?).zip(list("BENCH_BOOTSTRAP")?);
        let pairs = legs.map(|((prefill, decode), port)| {
            let fields = format!(r#"{{"bootstrap_host":"127.0.0.1","bootstrap_port":{port},"bootstrap_room":"#);
            Pair { prefill, decode, fields }
        });
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(500).build(connector);
        Ok(Self { client, pairs: pairs.collect(), served: AtomicUsize::new(0) })
    }

    async fn answer(&self, request: Request<Incoming>) -> Result<Answer, Failure> {
        let (head, body) = request.into_parts();
        if head.method == Method::GET {
            return Ok(Response::new(Either::Right(Full::default())));
        }
        let body = body.collect().await?.to_bytes();
        let number = self.served.fetch_add(1, Ordering::Relaxed);
        let pair = self.pairs.get(number % self.pairs.len()).ok_or("no pairs")?;
        let mut spliced = BytesMut::with_capacity(body.len() + 128);
        spliced.extend_from_slice(pair.fields.as_bytes());
        spliced.extend_from_slice(number.to_string().as_bytes());
        spliced.put_u8(b',');
        spliced.extend_from_slice(body.get(1..).unwrap_or_default());
        let spliced = spliced.freeze();
        let leg = |worker: &str| {
            Request::post(format!("{worker}{}", head.uri.path()))
                .header(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))
                .body(Full::new(spliced.clone()))
        };
        let (prefill, decode) = (self.client.request(leg(&pair.prefill)?), self.client.request(leg(&pair.decode)?));
        let (prefill, decode) = tokio::try_join!(prefill, decode)?;
        let mut rest = prefill.into_body();
        tokio::spawn(async move { while let Some(Ok(_)) = rest.frame().await {} });
        let (head, body) = decode.into_parts();
        let mut answer = Response::new(Either::Left(body));
        *answer.status_mut() = head.status;
        if let Some(kind) = head.headers.get(header::CONTENT_TYPE) {
            answer.headers_mut().insert(header::CONTENT_TYPE, kind.clone());
        }
        Ok(answer)
    }
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let floor = Arc::new(Floor::from_environment()?);
    let port: u16 = std::env::var("BENCH_PORT")?.parse()?;
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let floor = Arc::clone(&floor);
        let service = service_fn(move |request| {
            let floor = Arc::clone(&floor);
            async move {
                Ok::<_, Infallible>(floor.answer(request).await.unwrap_or_else(|error| {
                    let mut answer = Response::new(Either::Right(Full::from(error.to_string())));
                    *answer.status_mut() = StatusCode::BAD_GATEWAY;
                    answer
                }))
            }
        });
        tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

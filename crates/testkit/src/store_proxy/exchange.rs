//! One request and its answer: asks the store, and does to the answer what the model says. Owns the order of delays and faults.
//!
//! Invariant: an answer without a fault is the store's, byte for byte. A fault is counted only if it is injected.

use super::bandwidth::Bandwidth;
use super::fate::Fate;
use super::figures::{Arrival, Counters};
use super::model::{Away, StoreFault, StoreModel};
use super::origin::{MOST_BODY_BYTES, Origin, empty};
use futures_util::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::{CONTENT_LENGTH, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use std::collections::VecDeque;
use std::io;
use std::net::TcpStream as StdStream;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

/// Bodies that are kept, to be sent in the place of others, and the largest of them in bytes.
const OTHERS: usize = 16;
const MOST_OTHER_BYTES: usize = 8 << 20;
/// Time in which what was sent before a cut leaves the process.
const BEFORE_CUT: Duration = Duration::from_millis(1);

/// Body of an answer.
pub type Answer = UnsyncBoxBody<Bytes, io::Error>;

/// What all connections of a proxy share.
pub struct Exchange {
    origin: Origin,
    seed: u64,
    /// What is counted.
    pub counters: Counters,
    /// The model, without its faults that come first.
    pub model: watch::Sender<StoreModel>,
    /// Faults that come first.
    next: Mutex<VecDeque<StoreFault>>,
    /// Bodies of the last objects, by their paths.
    others: Mutex<VecDeque<(String, Bytes)>>,
    inward: Bandwidth,
    outward: Bandwidth,
}

/// Where the body of an answer ends, or stands still.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stop {
    Never,
    Cut(usize),
    Stall(usize, Duration),
}

/// A body that is being sent.
struct Sending {
    exchange: Arc<Exchange>,
    body: Bytes,
    sent: usize,
    stop: Stop,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Exchange {
    /// In front of this store.
    pub fn new(origin: Origin, seed: u64, mut model: StoreModel) -> Exchange {
        let next = Mutex::new(std::mem::take(&mut model.next).into());
        let (counters, others) = (Counters::default(), Mutex::default());
        let (inward, outward) = (Bandwidth::default(), Bandwidth::default());
        Exchange { origin, seed, counters, model: watch::Sender::new(model), next, others, inward, outward }
    }

    /// The model as it is now.
    pub fn model(&self) -> StoreModel {
        let next = locked(&self.next).iter().copied().collect();
        StoreModel { next, ..self.model.borrow().clone() }
    }

    /// Replaces the model. Answers that have begun keep the old one, except for its bandwidth.
    pub fn set_model(&self, mut model: StoreModel) {
        *locked(&self.next) = std::mem::take(&mut model.next).into();
        self.model.send_replace(model);
    }

    /// Answers a request.
    ///
    /// # Errors
    /// The caller must reset the connection, as the model says.
    pub async fn answer(
        self: Arc<Exchange>,
        request: Request<Incoming>,
        connection: &StdStream,
    ) -> Result<Response<Answer>, io::Error> {
        let (head, body) = request.into_parts();
        let address = head.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
        let mut arrival = self.counters.arrive(head.method.as_str(), &address);
        let fate = Fate::of(self.seed, &format!("{} {address}", head.method), arrival.nth);
        let body = self.receive(body).await?;
        self.wait_until_back().await;
        let begun = Instant::now();
        let model = self.model.borrow().clone();
        let fault = self.fault(&head.method, &address, &model, &fate);
        let due = begun + fate.latency(&model);
        if let Some(status) = fault.and_then(StoreFault::status) {
            sleep_until(due).await;
            self.counters.inject(fault.expect("it has a status"));
            let refusal = refusal(&head.method, status);
            return Ok(self.begin(refusal, Stop::Never, &mut arrival));
        }
        let is_reset = fault == Some(StoreFault::Reset);
        let mut answer = Response::new(Bytes::new());
        if !is_reset || fate.reaches_the_store() {
            answer = self.origin.ask(&head, body).await.unwrap_or_else(|e| {
                self.counters.fail();
                let mut answer = empty(StatusCode::BAD_GATEWAY);
                *answer.body_mut() = format!("the store behind the proxy does not answer: {e}\n").into();
                answer
            });
        }
        sleep_until(due).await;
        if is_reset {
            self.counters.inject(StoreFault::Reset);
            reset_when_closed(connection);
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let is_object =
            head.method == Method::GET && answer.status().is_success() && head.uri.query().is_none();
        let stop = self.damage(&mut answer, fault, &fate, &model, &address);
        if is_object && fault.is_none() {
            self.remember(&address, answer.body());
        }
        // The length of a body that is not sent is that of the object.
        if head.method != Method::HEAD && answer.status() != StatusCode::NOT_MODIFIED {
            let length = HeaderValue::from(answer.body().len());
            answer.headers_mut().insert(CONTENT_LENGTH, length);
        }
        Ok(self.begin(answer, stop, &mut arrival))
    }

    /// Reads the body of a request, at the rate of the model.
    async fn receive(&self, mut body: Incoming) -> Result<Bytes, io::Error> {
        let mut bytes = Vec::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(io::Error::other)?;
            let Some(data) = frame.data_ref() else { continue };
            self.counters.receive(data.len());
            if bytes.len() + data.len() > MOST_BODY_BYTES {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
            let rate = self.model.borrow().bandwidth_bytes;
            self.inward.pass(data.len(), rate, !bytes.is_empty()).await;
            bytes.extend_from_slice(data);
        }
        Ok(bytes.into())
    }

    /// Waits while the store is silent.
    async fn wait_until_back(&self) {
        let mut model = self.model.subscribe();
        // It cannot fail: the sender is ours.
        let _ = model.wait_for(|model| model.away != Some(Away::Silent)).await;
    }

    /// The fault of a request, if it has one.
    fn fault(&self, method: &Method, address: &str, model: &StoreModel, fate: &Fate) -> Option<StoreFault> {
        if !address.contains(&model.at) {
            return None;
        }
        let may_have = |fault: &StoreFault| !fault.is_of_body() || *method == Method::GET;
        let mut next = locked(&self.next);
        match next.front() {
            Some(first) if may_have(first) => next.pop_front(),
            _ => fate.fault(model).filter(may_have),
        }
    }

    /// Injects a fault of the body, if there is a body. Returns where it ends.
    fn damage(
        &self,
        answer: &mut Response<Bytes>,
        fault: Option<StoreFault>,
        fate: &Fate,
        model: &StoreModel,
        address: &str,
    ) -> Stop {
        let Some(fault) = fault.filter(|_| answer.status().is_success() && !answer.body().is_empty()) else {
            return Stop::Never;
        };
        let at = fate.place(answer.body().len());
        let mut stop = Stop::Never;
        match fault {
            StoreFault::CutBody => stop = Stop::Cut(at),
            StoreFault::StalledBody => stop = Stop::Stall(at, Duration::from_nanos(model.stall_ns)),
            StoreFault::FlippedBit => {
                let mut bytes = answer.body().to_vec();
                bytes[at] ^= fate.bit();
                *answer.body_mut() = bytes.into();
            }
            StoreFault::OtherObject => {
                let others = locked(&self.others);
                let different: Vec<_> = others.iter().filter(|(path, _)| path != address).collect();
                let Some((_, body)) = different.get(fate.place(different.len())) else { return Stop::Never };
                *answer.body_mut() = body.clone();
            }
            _ => return Stop::Never,
        }
        self.counters.inject(fault);
        stop
    }

    /// Keeps a body, to be sent in the place of others.
    fn remember(&self, address: &str, body: &Bytes) {
        let mut others = locked(&self.others);
        if body.len() <= MOST_OTHER_BYTES && others.iter().all(|(path, _)| path != address) {
            if others.len() == OTHERS {
                others.pop_front();
            }
            others.push_back((address.to_owned(), body.clone()));
        }
    }

    /// Begins to send an answer.
    fn begin(
        self: &Arc<Exchange>,
        answer: Response<Bytes>,
        stop: Stop,
        arrival: &mut Arrival<'_>,
    ) -> Response<Answer> {
        arrival.answer(answer.status().as_u16());
        let (head, body) = answer.into_parts();
        let sending = Sending { exchange: Arc::clone(self), body, sent: 0, stop };
        let body = stream::unfold(sending, |mut sending| async {
            let piece = sending.next().await?;
            Some((piece.map(Frame::data), sending))
        });
        Response::from_parts(head, StreamBody::new(body).boxed_unsync())
    }
}

impl Sending {
    /// The next piece, when it has passed.
    async fn next(&mut self) -> Option<Result<Bytes, io::Error>> {
        match self.stop {
            Stop::Cut(at) if at == self.sent => {
                sleep(BEFORE_CUT).await;
                return Some(Err(io::ErrorKind::UnexpectedEof.into()));
            }
            Stop::Stall(at, time) if at == self.sent => {
                match time.is_zero() {
                    true => std::future::pending::<()>().await,
                    false => sleep(time).await,
                }
                self.stop = Stop::Never;
            }
            _ => {}
        }
        let end = match self.stop {
            Stop::Cut(at) | Stop::Stall(at, _) => at,
            Stop::Never => self.body.len(),
        };
        let rate = self.exchange.model.borrow().bandwidth_bytes;
        let end = end.min(self.sent + Bandwidth::piece_bytes(rate));
        if end == self.sent {
            return None;
        }
        let piece = self.body.slice(self.sent..end);
        self.exchange.outward.pass(piece.len(), rate, self.sent > 0).await;
        self.exchange.counters.send(piece.len());
        self.sent = end;
        Some(Ok(piece))
    }
}

/// From now on, what closes the connection resets it.
pub fn reset_when_closed(connection: &StdStream) {
    // If it fails, the client sees that the connection was closed.
    let _ = rustix::net::sockopt::set_socket_linger(connection, Some(Duration::ZERO));
}

/// A status with a body, as S3 has it.
fn refusal(method: &Method, status: u16) -> Response<Bytes> {
    let code = match status {
        403 => "AccessDenied",
        404 => "NoSuchKey",
        429 => "TooManyRequests",
        500 => "InternalError",
        _ => "SlowDown",
    };
    let body = format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code></Error>\n");
    let mut answer = empty(StatusCode::from_u16(status).expect("statuses of faults are statuses"));
    answer.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
    if *method != Method::HEAD {
        *answer.body_mut() = body.into();
    }
    answer
}

/// An answer of the control endpoint.
pub fn whole(answer: Response<Bytes>) -> Response<Answer> {
    answer.map(|body| http_body_util::Full::new(body).map_err(|never| match never {}).boxed_unsync())
}

/// Reads a body that may not be longer than this.
pub async fn read_body<B: Body<Data = Bytes>>(body: B, most_bytes: usize) -> Option<Bytes>
where
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    Some(http_body_util::Limited::new(body, most_bytes).collect().await.ok()?.to_bytes())
}

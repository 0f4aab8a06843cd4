//! A running proxy: its listeners, its connections and its thread. Owns their lives.
//!
//! Invariants: a [`StoreProxy`] that is dropped has ended, with all its connections. It keeps its port while it refuses connections, so
//! that nobody else gets it.

use super::control;
use super::exchange::{Exchange, reset_when_closed};
use super::figures::StoreFigures;
use super::model::{Away, StoreModel};
use super::origin::Origin;
use anyhow::{Context, Result, anyhow};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream as StdStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// Connections that wait to be accepted.
const BACKLOG: u32 = 1024;
/// Pause after a connection could not be accepted, for example because descriptors ran out.
const PAUSE: Duration = Duration::from_millis(20);

/// How a proxy is started.
#[derive(Clone, Debug)]
pub struct StoreProxySettings {
    /// Where clients are answered; with port 0, at a port that is free.
    pub listen: SocketAddr,
    /// Where the control endpoint is; none: there is none.
    pub control: Option<SocketAddr>,
    /// What stands behind it.
    pub origin: Origin,
    /// What it does.
    pub model: StoreModel,
    /// What its random choices follow.
    pub seed: u64,
}

impl StoreProxySettings {
    /// A proxy at a free port of this host that does nothing yet.
    pub fn new(origin: Origin) -> StoreProxySettings {
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        StoreProxySettings { listen, control: None, origin, model: StoreModel::default(), seed: 1 }
    }
}

/// A proxy that runs in threads of this process.
pub struct StoreProxy {
    running: Arc<Running>,
    runtime: Option<Runtime>,
    address: SocketAddr,
    control: Option<SocketAddr>,
}

/// What its tasks share.
pub struct Running {
    /// What is done with requests.
    pub exchange: Arc<Exchange>,
    /// Whether connections are accepted now.
    accepts: watch::Sender<bool>,
}

impl StoreProxy {
    /// Starts a proxy. It answers when this returns, unless its model says that it is away.
    ///
    /// # Errors
    /// The model is none, or an address cannot be listened at.
    pub fn start(settings: StoreProxySettings) -> Result<StoreProxy> {
        let StoreProxySettings { listen, control, origin, model, seed } = settings;
        model.check().map_err(|why| anyhow!("the model cannot be followed: {why}"))?;
        let mut threads = tokio::runtime::Builder::new_multi_thread();
        let runtime = threads.worker_threads(2).thread_name("store-proxy").enable_all().build()?;
        let exchange = Arc::new(Exchange::new(origin, seed, model));
        let running = Arc::new(Running { exchange, accepts: watch::Sender::new(false) });
        let (address, control) = runtime.block_on(async {
            let at = |address: SocketAddr| move || format!("cannot listen at {address}");
            let port = bind(listen).with_context(at(listen))?;
            let address = port.local_addr()?;
            tokio::spawn(accept(Arc::clone(&running), port, address));
            let control = match control {
                None => None,
                Some(control) => {
                    let listener =
                        bind(control).and_then(|socket| socket.listen(BACKLOG)).with_context(at(control))?;
                    let address = listener.local_addr()?;
                    tokio::spawn(accept_control(Arc::clone(&running), listener));
                    Some(address)
                }
            };
            running.settle().await;
            anyhow::Ok((address, control))
        })?;
        Ok(StoreProxy { running, runtime: Some(runtime), address, control })
    }

    /// Its address, as `http://HOST:PORT`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Address of the control endpoint, as `http://HOST:PORT`.
    pub fn control_url(&self) -> Option<String> {
        self.control.map(|control| format!("http://{control}"))
    }

    /// The model as it is now, with those of its first faults that are still to come.
    pub fn model(&self) -> StoreModel {
        self.running.exchange.model()
    }

    /// Replaces the model. When this returns, new requests follow it; answers that have begun are not changed. Not for use in tasks
    /// of another runtime.
    ///
    /// # Errors
    /// The model cannot be followed, in words. Nothing has changed.
    pub fn set_model(&self, model: StoreModel) -> Result<()> {
        let runtime = self.runtime.as_ref().expect("it is there until drop");
        runtime
            .block_on(self.running.set_model(model))
            .map_err(|why| anyhow!("the model cannot be followed: {why}"))
    }

    /// What was counted since the start, or since the figures were cleared.
    pub fn figures(&self) -> StoreFigures {
        self.running.exchange.counters.figures()
    }

    /// Begins all figures at 0.
    pub fn clear_figures(&self) {
        self.running.exchange.counters.clear();
    }

    /// Serves until the process is ended.
    pub fn run(self) -> ! {
        loop {
            std::thread::park();
        }
    }
}

impl Drop for StoreProxy {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // A read of a file may still go on.
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
    }
}

impl Running {
    /// Replaces the model, and waits until the listener follows it.
    pub async fn set_model(&self, model: StoreModel) -> Result<(), String> {
        model.check()?;
        self.exchange.set_model(model);
        self.settle().await;
        Ok(())
    }

    async fn settle(&self) {
        let refuses = self.exchange.model.borrow().away == Some(Away::Refuses);
        // It cannot fail: the sender is ours.
        let _ = self.accepts.subscribe().wait_for(|accepts| *accepts != refuses).await;
    }

    /// Waits until the store refuses connections, or does not.
    async fn until(&self, refuses: bool) {
        let mut model = self.exchange.model.subscribe();
        // As above.
        let _ = model.wait_for(|model| (model.away == Some(Away::Refuses)) == refuses).await;
    }
}

/// A socket at an address which another one of this process may have as well.
fn bind(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.set_reuseport(true)?;
    socket.bind(address)?;
    Ok(socket)
}

/// Accepts connections while the store does not refuse them. `_port` keeps the port meanwhile.
async fn accept(running: Arc<Running>, _port: TcpSocket, address: SocketAddr) {
    loop {
        running.until(false).await;
        let listener = match bind(address).and_then(|socket| socket.listen(BACKLOG)) {
            Ok(listener) => listener,
            Err(_) => {
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        running.accepts.send_replace(true);
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => drop(tokio::spawn(serve(Arc::clone(&running), stream))),
                    Err(_) => tokio::time::sleep(PAUSE).await,
                },
                () = running.until(true) => break,
            }
        }
        drop(listener);
        running.accepts.send_replace(false);
    }
}

/// Serves a connection until the client ends it, or the store refuses connections.
async fn serve(running: Arc<Running>, stream: TcpStream) {
    let _ = stream.set_nodelay(true);
    // The same connection by another descriptor, which says how it is closed.
    let Ok(same) = stream.as_fd().try_clone_to_owned() else { return };
    let same = Arc::new(StdStream::from(same));
    let of_requests = Arc::clone(&same);
    let exchange = &running.exchange;
    let service = service_fn(move |request| {
        let (exchange, connection) = (Arc::clone(exchange), Arc::clone(&of_requests));
        async move { exchange.answer(request, &connection).await }
    });
    let served = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        // However it ends: what was not answered is counted.
        _ = served => {}
        () = running.until(true) => reset_when_closed(&same),
    }
}

async fn accept_control(running: Arc<Running>, listener: TcpListener) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let running = Arc::clone(&running);
        tokio::spawn(async move {
            let service = service_fn(|request| {
                let running = Arc::clone(&running);
                async move { Ok::<_, Infallible>(control::answer(running, request).await) }
            });
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

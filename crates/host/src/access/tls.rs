//! The way in over TCP: TLS always, and a token with each request. Owns the port and how long a handshake may take.
//!
//! Invariant: nothing that came in the clear is answered, and remote clients take no places from local ones.

use super::tokens::Tokens;
use anyhow::{Context, Result, bail};
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Where and how it listens: all of it, or not at all.
#[derive(Clone, Debug)]
pub struct Remote {
    /// Where.
    pub address: SocketAddr,
    /// The server's certificate and those above it, PEM.
    pub certificate: PathBuf,
    /// Its key, PEM.
    pub key: PathBuf,
    /// The file of tokens.
    pub tokens: PathBuf,
}

/// The open port.
pub struct RemoteListener {
    listener: TcpListener,
    remote: Remote,
    /// What the next who comes is greeted with.
    acceptor: RwLock<TlsAcceptor>,
    /// Whom it knows.
    pub tokens: Arc<Tokens>,
}

impl RemoteListener {
    /// Opens it, once everything that it takes was read.
    pub async fn open(remote: Remote) -> Result<RemoteListener> {
        let tokens = Arc::new(Tokens::load(&remote.tokens).context("--tokens")?);
        let config = config(&remote)?;
        let listener = TcpListener::bind(remote.address).await;
        let listener = listener.with_context(|| format!("--listen {}", remote.address))?;
        let acceptor = RwLock::new(TlsAcceptor::from(Arc::new(config)));
        Ok(RemoteListener { listener, remote, acceptor, tokens })
    }

    /// Reads the files again: tokens hold for the next request of each connection, the certificate for the next connection. All
    /// of them, or none if one cannot be used.
    pub fn reload(&self) -> Result<()> {
        let tokens = Tokens::load(&self.remote.tokens).context("--tokens")?;
        let config = config(&self.remote)?;
        self.tokens.become_those(tokens);
        *self.acceptor.write().unwrap_or_else(|poisoned| poisoned.into_inner()) =
            TlsAcceptor::from(Arc::new(config));
        Ok(())
    }

    /// Where it is: the port may have been the kernel's choice.
    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.local_addr().ok()
    }

    /// Whoever comes next, unknown yet. May be given up at any time.
    pub async fn next(&self) -> Option<PendingHandshake> {
        let (stream, address) = self.listener.accept().await.ok()?;
        let acceptor = self.acceptor.read().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
        Some(PendingHandshake { stream, address, acceptor })
    }
}

/// Somebody who has said nothing yet.
pub struct PendingHandshake {
    stream: TcpStream,
    /// Where it comes from.
    pub address: SocketAddr,
    acceptor: TlsAcceptor,
}

impl PendingHandshake {
    /// Speaks TLS with it, if it does in time.
    pub async fn greet(self) -> Option<TlsStream<TcpStream>> {
        let _ = self.stream.set_nodelay(true);
        let greeted = tokio::time::timeout(HANDSHAKE, self.acceptor.accept(self.stream)).await;
        greeted.ok()?.ok()
    }
}

fn config(remote: &Remote) -> Result<ServerConfig> {
    let at = |path: &Path| path.display().to_string();
    let certificates = CertificateDer::pem_file_iter(&remote.certificate)
        .and_then(|certificates| certificates.collect::<Result<Vec<_>, _>>())
        .with_context(|| format!("--tls-cert {}", at(&remote.certificate)))?;
    if certificates.is_empty() {
        bail!("--tls-cert {}: there is no certificate in it", at(&remote.certificate));
    }
    let rights = fs::metadata(&remote.key).with_context(|| format!("--tls-key {}", at(&remote.key)))?.mode();
    if rights & 0o007 != 0 {
        bail!("--tls-key {}: others may read it: chmod 0600", at(&remote.key));
    }
    let key = PrivateKeyDer::from_pem_file(&remote.key)
        .with_context(|| format!("--tls-key {}", at(&remote.key)))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(certificates, key)
        .context("--tls-cert and --tls-key do not go together")?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

//! The TCP listener: always with TLS, and a token in each request. Owns the port and the time limit of a handshake.
//!
//! Invariant: plain text is never answered, and remote clients take no slots from local ones.

use super::Known;
use super::sessions::Sessions;
use super::tokens::Tokens;
use crate::failure::Failure;
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

/// Longest time of a handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// The protocol identifier of HTTP/2 (RFC 9113, 3.1).
const HTTP_2: &[u8] = b"h2";

/// Whether the client has chosen HTTP/2.
pub fn speaks_http_2(stream: &TlsStream<TcpStream>) -> bool {
    stream.get_ref().1.alpn_protocol() == Some(HTTP_2)
}

/// Settings of the listener; all are required.
#[derive(Clone, Debug)]
pub struct Remote {
    /// Address to listen on.
    pub address: SocketAddr,
    /// File of the server's certificate chain, PEM.
    pub certificate: PathBuf,
    /// File of the server's key, PEM.
    pub key: PathBuf,
    /// File of the tokens.
    pub tokens: PathBuf,
}

/// The open listener.
pub struct RemoteListener {
    listener: TcpListener,
    remote: Remote,
    /// Accepts the handshake of the next connection.
    acceptor: RwLock<TlsAcceptor>,
    /// Who is let in.
    pub known: Arc<Known>,
}

impl RemoteListener {
    /// Opens the listener after its files were read.
    pub async fn open(remote: Remote) -> Result<RemoteListener> {
        let tokens = Tokens::load(&remote.tokens).context("--tokens")?;
        let config = config(&remote)?;
        let listener = TcpListener::bind(remote.address).await;
        let listener = listener.with_context(|| format!("--listen {}", remote.address))?;
        let acceptor = RwLock::new(TlsAcceptor::from(Arc::new(config)));
        let known = Arc::new(Known { tokens, sessions: Sessions::default() });
        Ok(RemoteListener { listener, remote, acceptor, known })
    }

    /// Reads the files again: tokens apply to the next request of each connection, the certificate to the next
    /// connection. Changes nothing if one of the files cannot be used.
    pub fn reload(&self) -> Result<()> {
        let tokens = Tokens::load(&self.remote.tokens).context("--tokens")?;
        let config = config(&self.remote)?;
        self.known.tokens.become_those(tokens);
        self.known.sessions.keep_those_of(&self.known.tokens);
        *self.acceptor.write().unwrap_or_else(|poisoned| poisoned.into_inner()) =
            TlsAcceptor::from(Arc::new(config));
        Ok(())
    }

    /// Address of the listener: the kernel may have chosen the port.
    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.local_addr().ok()
    }

    /// Accepts the next connection. Cancel safe.
    pub async fn next(&self) -> Option<PendingHandshake> {
        let (stream, address) = self.listener.accept().await.ok()?;
        let acceptor = self.acceptor.read().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
        Some(PendingHandshake { stream, address, acceptor })
    }
}

/// A connection before its TLS handshake.
pub struct PendingHandshake {
    stream: TcpStream,
    /// Address of the peer.
    pub address: SocketAddr,
    acceptor: TlsAcceptor,
}

impl PendingHandshake {
    /// Does the TLS handshake; `None` if that fails or takes too long.
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
        bail!(Failure::usage(format!(
            "--tls-cert {}: there is no certificate in it",
            at(&remote.certificate)
        )));
    }
    let rights = fs::metadata(&remote.key).with_context(|| format!("--tls-key {}", at(&remote.key)))?.mode();
    if rights & 0o007 != 0 {
        bail!(Failure::usage(format!("--tls-key {}: others may read it: chmod 0600", at(&remote.key))));
    }
    let key = PrivateKeyDer::from_pem_file(&remote.key)
        .with_context(|| format!("--tls-key {}", at(&remote.key)))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(certificates, key)
        .context("--tls-cert and --tls-key do not go together")?;
    config.alpn_protocols = vec![HTTP_2.to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

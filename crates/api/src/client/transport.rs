//! Connections to a daemon: a unix socket, or TCP with TLS. Owns how they are opened, and how the daemon is
//! authenticated.
//!
//! Invariant: over TCP nothing is sent before the server has shown a certificate for the requested host.

use super::{ClientError, HostPort, Token};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::{self, CertificateError, ClientConfig, RootCertStore};

/// File of the system's trusted certificates.
const SYSTEM_CA: &str = "/etc/ssl/certs/ca-certificates.crt";
/// Longest wait for each address of a host.
const REACH: Duration = Duration::from_secs(5);
/// Longest time of a handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Both directions of a connection.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// How the client connects to the daemon.
pub enum Transport {
    /// Connects to the daemon's unix socket.
    Socket(PathBuf),
    /// Connects over TCP, with TLS and a token.
    Remote(Box<TlsTransport>),
}

/// Settings of a connection over TCP.
pub struct TlsTransport {
    to: HostPort,
    /// Token of the user who sends the requests.
    pub token: Token,
    ca: PathBuf,
    tls: TlsConnector,
}

impl TlsTransport {
    /// Prepares connections to this host, whose certificate must be signed by one of these; by default of the system's.
    pub fn new(to: HostPort, token: Token, ca: Option<&Path>) -> Result<TlsTransport, ClientError> {
        let ca = ca.unwrap_or(Path::new(SYSTEM_CA)).to_owned();
        let roots = roots(&ca).map_err(|source| ClientError::File { path: ca.clone(), source })?;
        let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("the provider has the versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(TlsTransport { to, token, ca, tls: TlsConnector::from(Arc::new(config)) })
    }

    async fn connect(&self) -> Result<TlsStream<TcpStream>, ClientError> {
        let stream = self.reach().await.map_err(|source| {
            let hint = match source.kind() {
                io::ErrorKind::ConnectionRefused => "does spillwayd run there, with --listen?",
                io::ErrorKind::TimedOut | io::ErrorKind::HostUnreachable => {
                    "is the host up, and its port open?"
                }
                _ => "check host and port",
            };
            ClientError::Connect { at: self.to.to_string(), source, hint }
        })?;
        let _ = stream.set_nodelay(true);
        match timeout(HANDSHAKE, self.tls.connect(self.to.host.clone(), stream)).await {
            Ok(greeted) => greeted.map_err(|e| self.not_greeted(&e)),
            Err(_) => Err(self.broken(format!("it speaks no TLS for {} s", HANDSHAKE.as_secs()))),
        }
    }

    /// Connects to the first address of the host that answers.
    async fn reach(&self) -> io::Result<TcpStream> {
        let addresses: Vec<SocketAddr> =
            lookup_host((&*self.to.host.to_str(), self.to.port)).await?.collect();
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
        for address in addresses {
            let late = |_| Err(io::Error::new(io::ErrorKind::TimedOut, "it does not answer"));
            match timeout(REACH, TcpStream::connect(address)).await.unwrap_or_else(late) {
                Ok(stream) => return Ok(stream),
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    fn not_greeted(&self, error: &io::Error) -> ClientError {
        match error.get_ref().and_then(|error| error.downcast_ref()) {
            Some(rustls::Error::InvalidCertificate(why)) => {
                let why = match why {
                    CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                        let ca = self.ca.display();
                        format!(
                            "no certificate of {ca} has signed it: say which one has, with --ca or SPILLWAY_CA"
                        )
                    }
                    // Errors of webpki have no message of rustls.
                    CertificateError::Other(other) => {
                        format!("{other}: a server's own has basicConstraints=CA:FALSE")
                    }
                    why => why.to_string(),
                };
                ClientError::Untrusted { at: self.to.to_string(), why }
            }
            Some(other) => self.broken(format!("it speaks no TLS: {other}")),
            None => self.broken(format!("it speaks no TLS: {error}")),
        }
    }

    fn broken(&self, why: String) -> ClientError {
        ClientError::Broken { at: self.to.to_string(), why }
    }
}

/// Reads certificates from a file (PEM).
fn roots(path: &Path) -> io::Result<RootCertStore> {
    let bad = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    let failed = |e| match e {
        pem::Error::Io(e) => e,
        other => bad(other.to_string()),
    };
    let certificates = CertificateDer::pem_file_iter(path).map_err(failed)?;
    let certificates = certificates.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    let mut roots = RootCertStore::empty();
    // The system's file contains some that rustls cannot use.
    let (added, _) = roots.add_parsable_certificates(certificates);
    if added == 0 { Err(bad("there is no certificate in it".into())) } else { Ok(roots) }
}

impl Transport {
    /// Opens a connection to the daemon.
    pub async fn connect(&self) -> Result<Box<dyn Stream>, ClientError> {
        match self {
            Transport::Remote(remote) => Ok(Box::new(remote.connect().await?)),
            Transport::Socket(path) => match UnixStream::connect(path).await {
                Ok(stream) => Ok(Box::new(stream)),
                Err(source) => {
                    let hint = match source.kind() {
                        io::ErrorKind::PermissionDenied => "run as root or as a member of the socket's group",
                        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                            "is spillwayd running? Say where it listens with --socket or SPILLWAY_SOCKET"
                        }
                        _ => "check the path",
                    };
                    Err(ClientError::Connect { at: self.to_string(), source, hint })
                }
            },
        }
    }

    /// Value of the header `Host`.
    pub fn host(&self) -> String {
        match self {
            Transport::Socket(_) => "localhost".into(),
            Transport::Remote(remote) => remote.to.authority(),
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Transport::Socket(path) => path.display().fmt(f),
            Transport::Remote(remote) => remote.fmt(f),
        }
    }
}

impl fmt::Display for TlsTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to.fmt(f)
    }
}

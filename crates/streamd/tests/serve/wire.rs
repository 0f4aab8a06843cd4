//! Other hosts than the program: one that asks over TLS, and one that answers as it is told to.

use crate::scene::{CHUNKS, Image};
use spillway_image::digests::of_chunk;
use spillway_testkit::process::wait_until;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio_rustls::rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned,
};

/// Files of a host.
#[derive(Clone, Copy)]
pub struct Files<'a> {
    pub authority: &'a Path,
    pub certificate: &'a Path,
    pub key: &'a Path,
}

impl Files<'_> {
    fn roots(&self) -> Arc<RootCertStore> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.authority).unwrap()).unwrap();
        Arc::new(roots)
    }

    fn pair(&self) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let certificate = CertificateDer::from_pem_file(self.certificate).unwrap();
        (vec![certificate], PrivateKeyDer::from_pem_file(self.key).unwrap())
    }
}

/// An answer.
#[derive(Debug)]
pub struct Answered {
    pub status: u16,
    pub header: String,
    pub body: Vec<u8>,
}

/// A connection to a host.
pub struct Asker(BufReader<StreamOwned<ClientConnection, TcpStream>>);

impl Asker {
    /// With a certificate of its own, or with none.
    pub fn connect(address: SocketAddr, files: Files<'_>, has_certificate: bool) -> Asker {
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(files.roots());
        let config = match has_certificate {
            true => {
                let (certificates, key) = files.pair();
                config.with_client_auth_cert(certificates, key).unwrap()
            }
            false => config.with_no_client_auth(),
        };
        Asker::over(address, config)
    }

    /// With this certificate, and a key that need not be its own.
    pub fn with_key_of_another(address: SocketAddr, files: Files<'_>) -> Asker {
        let provider = Arc::new(ring::default_provider());
        let (certificates, key) = files.pair();
        let key = provider.key_provider.load_private_key(key).unwrap();
        let shown = SingleCertAndKey::from(CertifiedKey::new(certificates, key));
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(files.roots())
            .with_client_cert_resolver(Arc::new(shown));
        Asker::over(address, config)
    }

    fn over(address: SocketAddr, config: ClientConfig) -> Asker {
        let name = ServerName::IpAddress(address.ip().into());
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let connection = ClientConnection::new(Arc::new(config), name).unwrap();
        Asker(BufReader::new(StreamOwned::new(connection, stream)))
    }

    /// Sends a request; none if it is not answered.
    pub fn ask(&mut self, method: &str, path: &str, header: &str) -> Option<Answered> {
        self.send(method, path, header)?;
        let mut line = String::new();
        self.0.read_line(&mut line).ok()?;
        let status = line.split(' ').nth(1)?.parse().ok()?;
        let mut header = String::new();
        while self.0.read_line(&mut header).ok()? > 2 {}
        let header = header.to_lowercase();
        let len = header.lines().find_map(|line| line.strip_prefix("content-length: ")?.trim().parse().ok());
        let mut body = vec![0; if method == "HEAD" { 0 } else { len.unwrap_or(0) }];
        self.0.read_exact(&mut body).ok()?;
        Some(Answered { status, header, body })
    }

    /// Sends a request whose answer is not waited for.
    pub fn send(&mut self, method: &str, path: &str, header: &str) -> Option<()> {
        write!(self.0.get_mut(), "{method} {path} HTTP/1.1\r\nHost: x\r\n{header}\r\n").ok()
    }

    pub fn get(&mut self, path: &str, header: &str) -> Answered {
        self.ask("GET", path, header).expect("it is answered")
    }
}

/// How a host answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// As it should.
    Right,
    /// It says that it has all chunks, and has none.
    Empty,
    /// With a byte that is wrong.
    Flips,
    /// With a byte too many.
    Long,
    /// With a byte too few.
    Short,
    /// With an answer that ends in the middle.
    Cuts,
    /// Never, if it is asked for a chunk.
    Hangs,
    /// With the first half of a chunk, and nothing more.
    Stalls,
}

/// A host that answers.
pub struct Fake {
    asked: Arc<Asked>,
}

/// What a host was asked.
#[derive(Default)]
struct Asked {
    /// Paths of chunks.
    chunks: Mutex<Vec<String>>,
    /// It has answered a question other than for a chunk: what it has, or whether it is there.
    has_been_seen: AtomicBool,
}

impl Asked {
    fn answered(&self, line: &str) {
        self.has_been_seen.fetch_or(line.contains(" /have/"), Ordering::Release);
    }
}

impl Fake {
    pub fn start(address: SocketAddr, files: Files<'_>, manner: Manner, image: &Image) -> Fake {
        let provider = Arc::new(ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(files.roots(), Arc::clone(&provider));
        let (certificates, key) = files.pair();
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier.build().unwrap())
            .with_single_cert(certificates, key)
            .unwrap();
        let config = Arc::new(config);
        let listener = TcpListener::bind(address).unwrap();
        let chunks: Vec<_> = (0..CHUNKS).map(|chunk| image.chunk(chunk).to_vec()).collect();
        let chunks = Arc::new(chunks);
        let asked = Arc::new(Asked::default());
        let of_server = Arc::clone(&asked);
        // It ends with the test's process.
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (config, chunks, asked) =
                    (Arc::clone(&config), Arc::clone(&chunks), Arc::clone(&of_server));
                thread::spawn(move || {
                    let connection = ServerConnection::new(config).unwrap();
                    answer_all(StreamOwned::new(connection, stream), manner, &chunks, &asked)
                });
            }
        });
        Fake { asked }
    }

    /// Paths of chunks that it was asked for.
    pub fn asked(&self) -> Vec<String> {
        self.asked.chunks.lock().unwrap().clone()
    }

    /// Waits until it has answered what it has, or whether it is there.
    pub fn wait_until_seen(&self) {
        let seen = || self.asked.has_been_seen.load(Ordering::Acquire).then_some(());
        wait_until(Duration::from_secs(120), seen).expect("somebody looks at the host");
    }
}

/// Path of a chunk.
pub fn path_of(bytes: &[u8]) -> String {
    let name: String = of_chunk(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("/{}/{name}", &name[..4])
}

fn answer_all(
    stream: StreamOwned<ServerConnection, TcpStream>,
    manner: Manner,
    chunks: &[Vec<u8>],
    asked: &Asked,
) -> Option<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let mut header = String::new();
        while reader.read_line(&mut header).ok()? > 2 {}
        let path = line.split(' ').nth(1)?;
        let writer = reader.get_mut();
        let found = match path.starts_with("/have/") {
            true => (!line.starts_with("HEAD")).then(|| vec![0xff; chunks.len().div_ceil(8)]),
            false => {
                asked.chunks.lock().unwrap().push(path.into());
                let chunk = chunks.iter().find(|chunk| path_of(chunk) == path);
                chunk.filter(|_| manner != Manner::Empty).cloned()
            }
        };
        let Some(mut body) = found else {
            write!(writer, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n").ok()?;
            asked.answered(&line);
            continue;
        };
        let mut says = body.len();
        if !path.starts_with("/have/") {
            match manner {
                Manner::Right | Manner::Empty => {}
                Manner::Hangs => loop {
                    thread::park();
                },
                Manner::Flips => body[says / 2] ^= 1,
                Manner::Long => body.push(0),
                Manner::Short => body.truncate(says - 1),
                Manner::Cuts | Manner::Stalls => body.truncate(says / 2),
            }
            says = if matches!(manner, Manner::Cuts | Manner::Stalls) { says } else { body.len() };
        }
        write!(writer, "HTTP/1.1 200 OK\r\nContent-Length: {says}\r\n\r\n").ok()?;
        writer.write_all(&body).ok()?;
        writer.flush().ok()?;
        while manner == Manner::Stalls && body.len() < says {
            thread::park();
        }
        if body.len() < says {
            return None;
        }
        asked.answered(&line);
    }
}

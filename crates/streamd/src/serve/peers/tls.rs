//! Mutual TLS between hosts. Owns nothing: reads the files once, before the process gives up its rights.
//!
//! Invariant: both sides must have a certificate that this authority has signed. Nobody else is answered, or asked.

use spillway_registry::serve::PeerOrder;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};

/// What both sides use.
pub struct Configs {
    /// Of connections that others open.
    pub server: Arc<ServerConfig>,
    /// Of connections to others.
    pub client: ClientConfig,
}

/// Reads the files of an order.
///
/// # Errors
/// For people: the option whose file cannot be used, and why.
pub fn read(order: &PeerOrder) -> Result<Configs, String> {
    let certificates = certificates("--peer-cert", &order.certificate)?;
    let key = key(&order.key)?;
    let mut roots = RootCertStore::empty();
    for authority in self::certificates("--peer-ca", &order.authority)? {
        roots.add(authority).map_err(|e| fault("--peer-ca", &order.authority, e))?;
    }
    let (roots, provider) = (Arc::new(roots), Arc::new(ring::default_provider()));
    let no_pair = |e| format!("--peer-cert and --peer-key do not go together: {e}");
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
    let verifier = verifier.build().map_err(|e| fault("--peer-ca", &order.authority, e))?;
    // Both sides are this program: no older version is needed.
    let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])
        .map_err(|e| e.to_string())?
        .with_client_cert_verifier(verifier)
        .with_single_cert(certificates.clone(), key.clone_key())
        .map_err(no_pair)?;
    let client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(|e| e.to_string())?
        .with_root_certificates(roots)
        .with_client_auth_cert(certificates, key)
        .map_err(no_pair)?;
    Ok(Configs { server: Arc::new(server), client })
}

fn fault(option: &str, path: &Path, why: impl std::fmt::Display) -> String {
    format!("{option} {}: {why}", path.display())
}

fn certificates(option: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let certificates = read.map_err(|e| fault(option, path, e))?;
    match certificates.is_empty() {
        true => Err(fault(option, path, "there is no certificate in it")),
        false => Ok(certificates),
    }
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    let rights = fs::metadata(path).map_err(|e| fault("--peer-key", path, e))?.mode();
    if rights & 0o007 != 0 {
        return Err(fault("--peer-key", path, "others may read it: chmod 0600"));
    }
    PrivateKeyDer::from_pem_file(path).map_err(|e| fault("--peer-key", path, e))
}

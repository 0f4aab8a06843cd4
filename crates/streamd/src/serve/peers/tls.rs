//! TLS between hosts. Owns nothing: reads the files once, before the process gives up its rights.
//!
//! Invariant: both sides must have a certificate that the authority has signed or, without one, that of a member. Nobody else is answered,
//! or asked.

use super::members::{AdmittedVerifier, CertificateDigest, Members, PinnedVerifier};
use spillway_registry::serve::{PeerOrder, PeerTrust};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use tokio_rustls::rustls::client::Resumption;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio_rustls::rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};

/// What both sides use.
pub struct Tls {
    provider: Arc<CryptoProvider>,
    shown: Arc<CertifiedKey>,
    trust: Trust,
}

enum Trust {
    Authority(Arc<RootCertStore>, std::path::PathBuf),
    Members(Members),
}

impl Tls {
    /// Reads the files of an order. Without an authority, these members are let in.
    ///
    /// # Errors
    /// For people: the option whose file cannot be used, and why.
    pub fn read(order: &PeerOrder, members: Members) -> Result<Tls, String> {
        let provider = Arc::new(ring::default_provider());
        let certificates = certificates("--peer-cert", &order.certificate)?;
        let key = key(&order.key)?;
        let shown = CertifiedKey::from_der(certificates, key, &provider)
            .map_err(|e| format!("--peer-cert and --peer-key do not go together: {e}"))?;
        let trust = match &order.trust {
            PeerTrust::Members => Trust::Members(members),
            PeerTrust::Authority { file, .. } => {
                let mut roots = RootCertStore::empty();
                for authority in self::certificates("--peer-ca", file)? {
                    roots.add(authority).map_err(|e| fault("--peer-ca", file, e))?;
                }
                Trust::Authority(Arc::new(roots), file.clone())
            }
        };
        Ok(Tls { provider, shown: Arc::new(shown), trust })
    }

    fn shown(&self) -> Arc<SingleCertAndKey> {
        Arc::new(SingleCertAndKey::from(Arc::clone(&self.shown)))
    }

    /// Settings of connections that others open. Both sides are this program: no older version of TLS is needed.
    ///
    /// # Errors
    /// For people: the authority that cannot be used, and why.
    pub fn server(&self) -> Result<ServerConfig, String> {
        let builder = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| e.to_string())?;
        Ok(match &self.trust {
            Trust::Authority(roots, file) => {
                let verifier = WebPkiClientVerifier::builder_with_provider(
                    Arc::clone(roots),
                    Arc::clone(&self.provider),
                );
                let verifier = verifier.build().map_err(|e| fault("--peer-ca", file, e))?;
                builder.with_client_cert_verifier(verifier).with_cert_resolver(self.shown())
            }
            Trust::Members(members) => {
                let verifier = AdmittedVerifier::new(members.clone(), Arc::clone(&self.provider));
                let builder = builder.with_client_cert_verifier(Arc::new(verifier));
                let mut config = builder.with_cert_resolver(self.shown());
                // Whoever resumed a session would show no certificate.
                config.session_storage = Arc::new(NoServerSessionStorage {});
                config.send_tls13_tickets = 0;
                config
            }
        })
    }

    /// Settings of connections to a member with this certificate; without one, to any host whose certificate the authority has signed.
    ///
    /// # Errors
    /// For people: there is neither an authority nor a certificate.
    pub fn client(&self, certificate: Option<CertificateDigest>) -> Result<ClientConfig, String> {
        let builder = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| e.to_string())?;
        match (&self.trust, certificate) {
            (Trust::Authority(roots, _), None) => {
                let builder = builder.with_root_certificates(Arc::clone(roots));
                Ok(builder.with_client_cert_resolver(self.shown()))
            }
            (Trust::Members(_), Some(certificate)) => {
                let verifier = PinnedVerifier::new(certificate, Arc::clone(&self.provider));
                let builder = builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
                let mut config = builder.with_client_cert_resolver(self.shown());
                config.resumption = Resumption::disabled();
                config.enable_sni = false;
                Ok(config)
            }
            _ => Err("hosts are known by an authority, or each by its certificate".into()),
        }
    }
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

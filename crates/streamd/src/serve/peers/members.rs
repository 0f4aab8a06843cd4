//! Hosts that are known by digests of their certificates, without an authority. Owns the set of digests that are let in, and what both sides of a
//! handshake check.
//!
//! Invariant: both sides prove in each handshake that they have the key of their certificate. Names, validity and signers of certificates
//! count for nothing.

use spillway_image::digests::unhex;
use std::collections::HashSet;
use std::sync::{Arc, PoisonError, RwLock};
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme,
};

/// SHA-256 of a certificate (DER).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CertificateDigest([u8; 32]);

impl CertificateDigest {
    /// Computes the digest of a certificate.
    pub fn of(certificate: &CertificateDer<'_>) -> CertificateDigest {
        use sha2::{Digest, Sha256};
        CertificateDigest(Sha256::digest(certificate).into())
    }

    /// Reads 64 hexadecimal digits; `None` if the text is something else.
    pub fn parse(text: &str) -> Option<CertificateDigest> {
        unhex(text).map(CertificateDigest)
    }
}

/// The certificates that are let in. A clone is the same set.
#[derive(Clone, Debug, Default)]
pub struct Members(Arc<RwLock<HashSet<CertificateDigest>>>);

impl Members {
    /// Replaces the set. Who is missing in the new one is refused from the next request on.
    pub fn replace(&self, certificates: HashSet<CertificateDigest>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = certificates;
    }

    /// Whether this certificate is let in.
    pub fn admits(&self, certificate: &CertificateDigest) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).contains(certificate)
    }
}

/// Lets in clients that show a member's certificate.
#[derive(Debug)]
pub struct AdmittedVerifier {
    members: Members,
    provider: Arc<CryptoProvider>,
}

impl AdmittedVerifier {
    /// Lets these members in.
    pub fn new(members: Members, provider: Arc<CryptoProvider>) -> AdmittedVerifier {
        AdmittedVerifier { members, provider }
    }
}

/// Accepts the server that shows this certificate.
#[derive(Debug)]
pub struct PinnedVerifier {
    certificate: CertificateDigest,
    provider: Arc<CryptoProvider>,
}

impl PinnedVerifier {
    /// Accepts this certificate alone.
    pub fn new(certificate: CertificateDigest, provider: Arc<CryptoProvider>) -> PinnedVerifier {
        PinnedVerifier { certificate, provider }
    }
}

fn unknown() -> Error {
    CertificateError::UnknownIssuer.into()
}

fn too_old() -> Error {
    Error::General("it takes TLS 1.3".into())
}

impl ClientCertVerifier for AdmittedVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        match self.members.admits(&CertificateDigest::of(end_entity)) {
            true => Ok(ClientCertVerified::assertion()),
            false => Err(unknown()),
        }
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(too_old())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

impl ServerCertVerifier for PinnedVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match CertificateDigest::of(end_entity) == self.certificate {
            true => Ok(ServerCertVerified::assertion()),
            false => Err(unknown()),
        }
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(too_old())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

//! The certificate and the key by which other hosts know this one. Owns the two files in the state folder.
//!
//! Invariant: the key leaves the folder never, and only its owner may read it. The file of the certificate is written last: where it is,
//! the key is complete.

use anyhow::{Context, Result, bail};
use base64ct::{Base64, Encoding};
use rcgen::{CertificateParams, DnType, KeyPair, PKCS_ECDSA_P256_SHA256, date_time_ymd};
use rustix::fs::{Mode, fchmod};
use sha2::{Digest, Sha256};
use spillway_api::Name;
use std::fmt;
use std::fs::{self, DirBuilder, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_rustls::rustls::sign::CertifiedKey;

/// Folder of the files in the state folder.
const FOLDER: &str = "fleet";
const CERTIFICATE: &str = "cert.pem";
const KEY: &str = "key.pem";
/// Longest line of PEM (RFC 7468, 2).
const LINE: usize = 64;
/// Years of the certificate's validity, which nobody checks: a host is known as long as etcd has its digest.
const VALID: (i32, i32) = (2000, 4095);

/// SHA-256 of a certificate (DER), by which a host is known.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CertificateDigest([u8; 32]);

impl CertificateDigest {
    /// Computes the digest of a certificate.
    pub fn of(certificate: &CertificateDer<'_>) -> CertificateDigest {
        CertificateDigest(Sha256::digest(certificate).into())
    }
}

/// Error for a text that is no digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a digest of a certificate has 64 hexadecimal digits")]
pub struct DigestError;

impl FromStr for CertificateDigest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<CertificateDigest, DigestError> {
        let text = text.as_bytes();
        if text.len() != 64 {
            return Err(DigestError);
        }
        let digit = |byte: u8| char::from(byte).to_digit(16).ok_or(DigestError);
        let mut digest = [0; 32];
        for (byte, pair) in digest.iter_mut().zip(text.chunks_exact(2)) {
            *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
        }
        Ok(CertificateDigest(digest))
    }
}

impl fmt::Display for CertificateDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for CertificateDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The certificate of this host, and its key.
#[derive(Clone)]
pub struct Identity {
    /// What is shown in handshakes.
    pub(super) shown: Arc<CertifiedKey>,
    digest: CertificateDigest,
}

impl Identity {
    /// Reads the certificate and the key of this host from its state folder. The first time, makes them.
    ///
    /// # Errors
    /// The files cannot be read or written, or do not belong together.
    pub fn open(state: &Path, host: &Name) -> Result<Identity> {
        let folder = state.join(FOLDER);
        let certificate = folder.join(CERTIFICATE);
        match fs::symlink_metadata(&certificate) {
            Err(e) if e.kind() == ErrorKind::NotFound => make(&folder, host)
                .with_context(|| format!("{}: cannot make the certificate of this host", folder.display()))?,
            _ => {}
        }
        let advice = || {
            format!(
                "{}: the certificate or the key of this host is damaged: remove the folder, and the next start makes new ones",
                folder.display()
            )
        };
        Identity::read(&folder).with_context(advice)
    }

    fn read(folder: &Path) -> Result<Identity> {
        let certificate = CertificateDer::from_pem_file(folder.join(CERTIFICATE)).context(CERTIFICATE)?;
        let key = PrivateKeyDer::from_pem_file(folder.join(KEY)).context(KEY)?;
        Identity::of(certificate, key)
    }

    fn of(certificate: CertificateDer<'static>, key: PrivateKeyDer<'static>) -> Result<Identity> {
        let digest = CertificateDigest::of(&certificate);
        let shown = CertifiedKey::from_der(vec![certificate], key, &ring::default_provider())
            .context("the certificate and the key do not belong together")?;
        Ok(Identity { shown: Arc::new(shown), digest })
    }

    /// Paths of the files of the certificate and of the key in a state folder.
    pub fn files(state: &Path) -> [PathBuf; 2] {
        [CERTIFICATE, KEY].map(|name| state.join(FOLDER).join(name))
    }

    /// Digest of the certificate, for the record `alive/HOST`.
    pub fn digest(&self) -> CertificateDigest {
        self.digest
    }
}

/// Makes a key and a certificate that it signs itself, and writes them to the folder.
fn make(folder: &Path, host: &Name) -> Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => bail!(e),
        _ => {}
    }
    let (certificate, key) = new_certificate(host)?;
    write(folder, KEY, &pem("PRIVATE KEY", key.secret_pkcs8_der()))?;
    write(folder, CERTIFICATE, &pem("CERTIFICATE", &certificate))
}

/// Makes a key (ECDSA, P-256) and a certificate of it for a host of this name.
pub(super) fn new_certificate(host: &Name) -> Result<(CertificateDer<'static>, PrivatePkcs8KeyDer<'static>)> {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    let mut params = CertificateParams::new(vec![host.to_string()])?;
    params.distinguished_name.push(DnType::CommonName, host.as_str());
    params.not_before = date_time_ymd(VALID.0, 1, 1);
    params.not_after = date_time_ymd(VALID.1, 12, 31);
    let certificate = params.self_signed(&key)?;
    Ok((certificate.der().clone(), PrivatePkcs8KeyDer::from(key.serialize_der())))
}

/// Encodes data as PEM (RFC 7468).
fn pem(label: &str, data: &[u8]) -> String {
    let text = Base64::encode_string(data);
    let mut pem = format!("-----BEGIN {label}-----\n");
    for line in text.as_bytes().chunks(LINE) {
        pem.extend(line.iter().map(|byte| char::from(*byte)));
        pem.push('\n');
    }
    pem + &format!("-----END {label}-----\n")
}

/// Writes a file that only its owner may read: all of it, or nothing.
fn write(folder: &Path, name: &str, text: &str) -> Result<()> {
    let partial = folder.join(format!("{name}.partial"));
    let mut options = File::options();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
    // One that an earlier start has left may have other permissions.
    fchmod(&file, Mode::RUSR | Mode::WUSR)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&partial, folder.join(name))?;
    Ok(File::open(folder)?.sync_all()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    fn host() -> Name {
        "host-a".parse().unwrap()
    }

    #[test]
    fn a_host_keeps_its_certificate() {
        let dir = tempfile::tempdir().unwrap();
        let first = Identity::open(dir.path(), &host()).unwrap().digest();
        assert_eq!(Identity::open(dir.path(), &host()).unwrap().digest(), first);
        let folder = dir.path().join(FOLDER);
        assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
        let mut names: Vec<_> =
            fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, [CERTIFICATE, KEY]);
        assert!(names.iter().all(|name| fs::metadata(folder.join(name)).unwrap().mode() & 0o777 == 0o600));
        assert_eq!(first.to_string().parse(), Ok(first));
    }

    /// The daemon was killed between the two files, or while it wrote one.
    #[test]
    fn half_an_identity_is_made_anew() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join(FOLDER);
        let first = Identity::open(dir.path(), &host()).unwrap().digest();
        fs::remove_file(folder.join(CERTIFICATE)).unwrap();
        fs::write(folder.join("cert.pem.partial"), "-----BEGIN").unwrap();
        let second = Identity::open(dir.path(), &host()).unwrap().digest();
        assert_ne!(first, second);
        assert_eq!(fs::metadata(folder.join(CERTIFICATE)).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn files_that_do_not_belong_together_are_refused() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        Identity::open(dir.path(), &host()).unwrap();
        Identity::open(other.path(), &host()).unwrap();
        let at = |dir: &tempfile::TempDir, name| dir.path().join(FOLDER).join(name);
        fs::copy(at(&other, KEY), at(&dir, KEY)).unwrap();
        let why = format!("{:#}", Identity::open(dir.path(), &host()).err().unwrap());
        assert!(why.contains("do not belong together") && why.contains("remove the folder"), "{why}");
        fs::write(at(&dir, CERTIFICATE), "no certificate").unwrap();
        assert!(Identity::open(dir.path(), &host()).is_err());
    }

    #[test]
    fn a_digest_has_64_digits() {
        for text in ["", "0", &"0".repeat(63), &"0".repeat(65), &"g".repeat(64), &"é".repeat(32)] {
            assert_eq!(text.parse::<CertificateDigest>(), Err(DigestError), "{text}");
        }
    }
}

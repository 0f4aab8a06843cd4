//! How etcd knows this host, and this host etcd: files of certificates, a user. Owns the form of these settings, and reads the files.
//!
//! Invariants: a certificate comes with its key. Files are read anew for each connection, so that replaced ones count, and none is read
//! beyond [`MOST_BYTES`].

use super::error::MemberFailure;
use etcd_client::{Certificate, ConnectOptions, Identity, TlsOptions};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Longest file that is read.
const MOST_BYTES: u64 = 1 << 20;
/// Where distributions keep the authorities that a host trusts.
const SYSTEM_AUTHORITIES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Files for TLS with etcd, in PEM. As text: `ca=FILE,cert=FILE,key=FILE`, or `system` for those of the host's authorities.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EtcdTls {
    /// Authorities that sign certificates of etcd's members. None: those that the host trusts.
    pub authorities: Option<PathBuf>,
    /// Certificate of this host, and its key. None: etcd asks for none.
    pub identity: Option<(PathBuf, PathBuf)>,
}

impl EtcdTls {
    /// The file to look at when the files cannot be used together.
    pub(super) fn suspect(&self) -> PathBuf {
        let certificate = self.identity.as_ref().map(|(certificate, _)| certificate);
        certificate.or(self.authorities.as_ref()).cloned().unwrap_or_default()
    }
}

/// A user of etcd. As text: `user=NAME,password=FILE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdUser {
    /// Name of the user.
    pub name: String,
    /// File with the password; a newline at its end does not count.
    pub password: PathBuf,
}

/// Reads `NAME=VALUE,...` with these names, each at most once.
fn read_pairs<const N: usize>(text: &str, names: [&str; N]) -> Result<[Option<String>; N], String> {
    let mut found = [const { None }; N];
    for pair in text.split(',') {
        let place = pair
            .split_once('=')
            .and_then(|(name, value)| Some((names.iter().position(|n| *n == name)?, value)));
        let Some((place, value)) = place.filter(|(_, value)| !value.is_empty()) else {
            return Err(format!("'{pair}' is none of {}=...", names.join("=..., ")));
        };
        if found[place].replace(value.to_owned()).is_some() {
            return Err(format!("{} is there twice", names[place]));
        }
    }
    Ok(found)
}

impl FromStr for EtcdTls {
    type Err = String;

    fn from_str(text: &str) -> Result<EtcdTls, String> {
        if text == "system" {
            return Ok(EtcdTls::default());
        }
        let [authorities, certificate, key] = read_pairs(text, ["ca", "cert", "key"])?;
        let identity = match (certificate, key) {
            (Some(certificate), Some(key)) => Some((certificate.into(), key.into())),
            (None, None) => None,
            (Some(_), None) => return Err("cert=FILE needs key=FILE".into()),
            (None, Some(_)) => return Err("key=FILE needs cert=FILE".into()),
        };
        Ok(EtcdTls { authorities: authorities.map(Into::into), identity })
    }
}

impl FromStr for EtcdUser {
    type Err = String;

    fn from_str(text: &str) -> Result<EtcdUser, String> {
        match read_pairs(text, ["user", "password"])? {
            [Some(name), Some(password)] => Ok(EtcdUser { name, password: password.into() }),
            _ => Err("it takes user=NAME,password=FILE".into()),
        }
    }
}

/// Adds what the files say to the options of a connection. Blocks.
pub(super) fn read_options(
    mut options: ConnectOptions,
    tls: Option<&EtcdTls>,
    user: Option<&EtcdUser>,
) -> Result<ConnectOptions, MemberFailure> {
    if let Some(tls) = tls {
        let authorities = match &tls.authorities {
            Some(path) => read_pem(path, "CERTIFICATE")?,
            None => system_authorities()?,
        };
        let mut given = TlsOptions::new().ca_certificate(Certificate::from_pem(authorities));
        if let Some((certificate, key)) = &tls.identity {
            given = given.identity(Identity::from_pem(
                read_pem(certificate, "CERTIFICATE")?,
                read_pem(key, "PRIVATE KEY")?,
            ));
        }
        options = options.with_tls(given);
    }
    if let Some(user) = user {
        let password = String::from_utf8(read(&user.password)?)
            .map_err(|_| MemberFailure::File(user.password.clone(), "is not text".into()))?;
        options = options.with_user(user.name.clone(), password.trim_end_matches(['\r', '\n']));
        options = options.with_auto_token_refresh(true);
    }
    Ok(options)
}

fn read(path: &Path) -> Result<Vec<u8>, MemberFailure> {
    let failure = |why: String| MemberFailure::File(path.to_owned(), why);
    let file = File::open(path).map_err(|why| failure(format!("cannot be opened: {why}")))?;
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|why| failure(format!("cannot be read: {why}")))?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(failure("is longer than 1 MiB".into()));
    }
    Ok(bytes)
}

/// Reads a file that has something of this kind in PEM.
fn read_pem(path: &Path, kind: &str) -> Result<Vec<u8>, MemberFailure> {
    let bytes = read(path)?;
    let has_kind = String::from_utf8_lossy(&bytes).lines().any(|line| {
        line.trim().strip_prefix("-----BEGIN ").is_some_and(|rest| rest.trim_end_matches('-').ends_with(kind))
    });
    if has_kind {
        return Ok(bytes);
    }
    Err(MemberFailure::File(path.to_owned(), format!("has no {} in PEM", kind.to_lowercase())))
}

fn system_authorities() -> Result<Vec<u8>, MemberFailure> {
    match SYSTEM_AUTHORITIES.iter().map(Path::new).find(|path| path.exists()) {
        Some(path) => read(path),
        None => Err(MemberFailure::File(
            SYSTEM_AUTHORITIES[0].into(),
            "is not there: name the authority of etcd's certificates, --fleet-tls ca=FILE".into(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_tls_are_read_from_text() {
        let tls = |text: &str| text.parse::<EtcdTls>();
        let identity = Some(("/c".into(), "/k".into()));
        assert_eq!(tls("system"), Ok(EtcdTls::default()));
        assert_eq!(tls("ca=/a"), Ok(EtcdTls { authorities: Some("/a".into()), identity: None }));
        assert_eq!(tls("key=/k,cert=/c"), Ok(EtcdTls { authorities: None, identity }));
        for (text, why) in [
            ("", "'' is none of ca=..."),
            ("ca", "'ca' is none of"),
            ("ca=", "'ca=' is none of"),
            ("ca=/a,ca=/b", "ca is there twice"),
            ("cert=/c", "needs key=FILE"),
            ("ca=/a,key=/k", "needs cert=FILE"),
            ("system,ca=/a", "'system' is none of"),
        ] {
            assert!(tls(text).is_err_and(|error| error.contains(why)), "{text}");
        }
    }

    #[test]
    fn a_user_has_a_file_with_the_password() {
        let user = EtcdUser { name: "host".into(), password: "/p".into() };
        assert_eq!("user=host,password=/p".parse(), Ok(user));
        assert!("user=host".parse::<EtcdUser>().is_err());
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: &[u8]| {
            std::fs::write(dir.path().join(name), bytes).unwrap();
            dir.path().join(name)
        };
        for (path, why) in [
            (dir.path().join("none"), "none cannot be opened"),
            (file("large", &vec![0; 1 + (1 << 20)]), "large is longer than 1 MiB"),
            (file("key", b"-----BEGIN PRIVATE KEY-----\n"), "key has no certificate in PEM"),
        ] {
            let tls = EtcdTls { authorities: Some(path), identity: None };
            let error = read_options(ConnectOptions::new(), Some(&tls), None).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}

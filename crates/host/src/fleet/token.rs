//! Tokens by which hosts join a fleet: the address of etcd and what it wants of its clients, in one line. Owns their form.
//!
//! Invariants: a token is a secret. Its files are written for the user of the daemon alone, and a file that is there is only replaced by that
//! of another token: somebody may have renewed a certificate.

use super::etcd::{EtcdAddress, EtcdTls, EtcdUser};
use anyhow::{Context, Result, bail};
use base64ct::{Base64UrlUnpadded, Encoding};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// What a token begins with: the version of its form.
const PREFIX: &str = "spillway-fleet-1.";
/// File with the digest of the token whose files are in the folder.
const DIGEST: &str = "token-digest";
/// Longest file in a token, and longest token.
const MOST_BYTES: u64 = 64 << 10;

/// Content of a token.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    /// Address of the fleet, `etcd://HOST:PORT,.../NAME`.
    address: String,
    /// Files for TLS; none: without TLS.
    tls: Option<TlsContent>,
    /// User of etcd and password.
    user: Option<(String, String)>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TlsContent {
    authorities: Option<String>,
    identity: Option<(String, String)>,
}

/// How etcd is reached, as a daemon is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdAccess {
    /// Members of etcd, and name of the fleet.
    pub address: EtcdAddress,
    /// Files for TLS with etcd.
    pub tls: Option<EtcdTls>,
    /// User of etcd.
    pub user: Option<EtcdUser>,
}

/// Makes a token of what this daemon was told.
///
/// # Errors
/// A file cannot be read.
pub fn make(access: &EtcdAccess) -> Result<String> {
    let tls = |tls: &EtcdTls| -> Result<TlsContent> {
        let identity = tls
            .identity
            .as_ref()
            .map(|(certificate, key)| Ok::<_, anyhow::Error>((read(certificate)?, read(key)?)));
        Ok(TlsContent {
            authorities: tls.authorities.as_deref().map(read).transpose()?,
            identity: identity.transpose()?,
        })
    };
    let user =
        access.user.as_ref().map(|user| Ok::<_, anyhow::Error>((user.name.clone(), read(&user.password)?)));
    let content = Content {
        address: access.address.to_string(),
        tls: access.tls.as_ref().map(tls).transpose()?,
        user: user.transpose()?,
    };
    let json = serde_json::to_vec(&content).context("the token")?;
    Ok(format!("{PREFIX}{}", Base64UrlUnpadded::encode_string(&json)))
}

/// Takes a token from a file. What etcd wants is written below the state folder, except for what was `given` in other ways, which counts.
///
/// # Errors
/// There is no token in the file, or the folder cannot be written to.
pub fn take(file: &Path, state: &Path, given: (Option<EtcdTls>, Option<EtcdUser>)) -> Result<EtcdAccess> {
    let text = read(file)?;
    let Some(encoded) = text.trim().strip_prefix(PREFIX) else {
        bail!("{}: there is no token in it, as 'spillway fleet join-token' prints it", file.display());
    };
    let damaged = || format!("{}: the token is damaged: make another one", file.display());
    let json = Base64UrlUnpadded::decode_vec(encoded).ok().with_context(damaged)?;
    let content: Content = serde_json::from_slice(&json).with_context(damaged)?;
    let address = content.address.parse().with_context(damaged)?;
    let folder = state.join("fleet");
    let digest: String = Sha256::digest(&json).iter().map(|byte| format!("{byte:02x}")).collect();
    let is_known = read(&folder.join(DIGEST)).is_ok_and(|known| known == digest);
    let write = |name: &str, text: &str| match folder.join(name) {
        path if is_known && path.exists() => Ok(path),
        _ => write(&folder, name, text),
    };
    let tls = |tls: TlsContent| -> Result<EtcdTls> {
        let authorities = tls.authorities.as_deref().map(|text| write("etcd-ca.pem", text)).transpose()?;
        let identity = match tls.identity {
            Some((certificate, key)) => {
                Some((write("etcd-cert.pem", &certificate)?, write("etcd-key.pem", &key)?))
            }
            None => None,
        };
        Ok(EtcdTls { authorities, identity })
    };
    let user = |(name, password): (String, String)| -> Result<EtcdUser> {
        Ok(EtcdUser { name, password: write("etcd-password", &password)? })
    };
    let (given_tls, given_user) = given;
    let access = EtcdAccess {
        address,
        tls: match given_tls {
            Some(given) => Some(given),
            None => content.tls.map(tls).transpose()?,
        },
        user: match given_user {
            Some(given) => Some(given),
            None => content.user.map(user).transpose()?,
        },
    };
    // After the files: one that is missing is written again with the next start.
    write(DIGEST, &digest)?;
    Ok(access)
}

fn read(file: &Path) -> Result<String> {
    let mut text = String::new();
    let opened = File::open(file).with_context(|| format!("{}: cannot read", file.display()))?;
    let bytes = opened.take(MOST_BYTES + 1).read_to_string(&mut text);
    let bytes = bytes.with_context(|| format!("{}: cannot read", file.display()))?;
    if bytes as u64 > MOST_BYTES {
        bail!("{}: it is larger than 64 KiB", file.display());
    }
    Ok(text)
}

/// Writes a file completely or not at all, for this user alone.
fn write(folder: &Path, name: &str, text: &str) -> Result<PathBuf> {
    let path = folder.join(name);
    let failed = || format!("{}: cannot write", path.display());
    if !folder.exists() {
        DirBuilder::new().mode(0o700).recursive(true).create(folder).with_context(failed)?;
    }
    let new = folder.join(format!(".{name}.new"));
    let _ = fs::remove_file(&new);
    let mut file =
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new).with_context(failed)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).with_context(failed)?;
    fs::rename(&new, &path).with_context(failed)?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn what_one_host_was_told_is_told_to_another() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let address: EtcdAddress = "etcd://a,b:4000/site".parse().unwrap();
        let tls = EtcdTls {
            authorities: Some(path("ca", "CA")),
            identity: Some((path("cert", "CERT"), path("key", "KEY"))),
        };
        let user = EtcdUser { name: "u".into(), password: path("password", "P") };
        let access = EtcdAccess { address: address.clone(), tls: Some(tls), user: Some(user) };
        let token = path("token", &format!("{}\n", make(&access).unwrap()));
        let state = dir.path().join("state");
        let none = || (None, None);
        let taken = take(&token, &state, none()).unwrap();
        assert_eq!(taken.address, address);
        let tls = taken.tls.unwrap();
        let (certificate, key) = tls.identity.unwrap();
        let files = [tls.authorities.unwrap(), certificate, key, taken.user.unwrap().password];
        assert_eq!(
            files.each_ref().map(|file| fs::read_to_string(file).unwrap()),
            ["CA", "CERT", "KEY", "P"]
        );
        assert!(files.iter().all(|file| file.starts_with(&state)));
        assert!(files.iter().all(|file| fs::metadata(file).unwrap().permissions().mode() & 0o777 == 0o600));
        // Once more, as with each start: what was renewed stays, and what is missing comes again.
        fs::write(&files[1], "RENEWED").unwrap();
        fs::remove_file(&files[2]).unwrap();
        take(&token, &state, none()).unwrap();
        let read = |file: &PathBuf| fs::read_to_string(file).unwrap();
        assert_eq!((read(&files[1]), read(&files[2])), ("RENEWED".into(), "KEY".into()));
        // Another token.
        path("cert", "LATER");
        let token = path("token", &make(&access).unwrap());
        take(&token, &state, none()).unwrap();
        assert_eq!(read(&files[1]), "LATER");
        let plain = EtcdAccess { address: address.clone(), tls: None, user: None };
        let token = path("token", &make(&plain).unwrap());
        assert_eq!(take(&token, &state, none()).unwrap(), plain);
        // What was given in other ways counts, and of the token nothing is written.
        let token = path("token", &make(&access).unwrap());
        let given = EtcdTls { authorities: Some("/ca".into()), identity: None };
        let user = EtcdUser { name: "v".into(), password: "/p".into() };
        let other = dir.path().join("other");
        let taken = take(&token, &other, (Some(given.clone()), Some(user.clone()))).unwrap();
        assert_eq!(taken, EtcdAccess { address: address.clone(), tls: Some(given), user: Some(user) });
        assert!(!other.join("fleet/etcd-key.pem").exists());
    }

    #[test]
    fn what_is_no_token_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        for (text, why) in [
            ("", "there is no token"),
            ("etcd://a/site", "there is no token"),
            ("spillway-fleet-1.*", "is damaged"),
            ("spillway-fleet-1.e30", "is damaged"),
        ] {
            fs::write(&file, text).unwrap();
            let error = format!("{:#}", take(&file, dir.path(), (None, None)).unwrap_err());
            assert!(error.contains(why), "{text}: {error}");
        }
        fs::write(&file, vec![b'a'; 70_000]).unwrap();
        assert!(take(&file, dir.path(), (None, None)).is_err());
        assert!(take(&dir.path().join("none"), dir.path(), (None, None)).is_err());
    }
}

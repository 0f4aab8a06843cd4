//! Certificates of servers that exist for one test. openssl makes them.
//!
//! Invariant: nobody else can read a key.

use anyhow::{Context, Result, ensure};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Makes a key and a certificate, signed by itself, for a host of this name (not its address); one that is of a CA, if it is to
/// be a wrong one.
pub fn make(host: &str, is_ca: bool, certificate: &Path, key: &Path) -> Result<()> {
    let config = certificate.with_extension("cnf");
    let is_ca = if is_ca { "TRUE" } else { "FALSE" };
    let text = format!(
        "[req]\ndistinguished_name=dn\nprompt=no\nx509_extensions=ext\n[dn]\nCN={host}\n[ext]\n\
         subjectAltName=DNS:{host}\nbasicConstraints=critical,CA:{is_ca}\n"
    );
    fs::write(&config, text).with_context(|| config.display().to_string())?;
    let mut openssl = Command::new("openssl");
    openssl.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]);
    openssl.args(["-days", "2", "-config"]).arg(&config);
    let made = openssl.arg("-keyout").arg(key).arg("-out").arg(certificate).output().context("openssl")?;
    ensure!(made.status.success(), "openssl: {}", String::from_utf8_lossy(&made.stderr));
    fs::set_permissions(key, Permissions::from_mode(0o600)).with_context(|| key.display().to_string())
}

/// An authority that signs certificates of a test's hosts.
pub struct Authority {
    folder: PathBuf,
}

impl Authority {
    /// Makes an authority in a folder.
    pub fn new(folder: &Path) -> Result<Authority> {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        let authority = Authority { folder: folder.to_owned() };
        make("authority", true, &authority.certificate(), &authority.key())?;
        Ok(authority)
    }

    /// File of its certificate.
    pub fn certificate(&self) -> PathBuf {
        self.folder.join("ca.crt")
    }

    fn key(&self) -> PathBuf {
        self.folder.join("ca.key")
    }

    /// Makes a key and a certificate for these names, such as `IP:127.0.0.1` or `DNS:host`.
    pub fn sign(&self, names: &str, certificate: &Path, key: &Path) -> Result<()> {
        let config = certificate.with_extension("cnf");
        let text = format!(
            "[req]\ndistinguished_name=dn\nprompt=no\nx509_extensions=ext\n[dn]\nCN=host\n[ext]\n\
             subjectAltName={names}\nbasicConstraints=critical,CA:FALSE\nextendedKeyUsage=serverAuth,clientAuth\n"
        );
        fs::write(&config, text).with_context(|| config.display().to_string())?;
        let mut openssl = Command::new("openssl");
        openssl.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]);
        openssl.arg("-CA").arg(self.certificate()).arg("-CAkey").arg(self.key());
        openssl.args(["-days", "2", "-config"]).arg(&config);
        let made =
            openssl.arg("-keyout").arg(key).arg("-out").arg(certificate).output().context("openssl")?;
        ensure!(made.status.success(), "openssl: {}", String::from_utf8_lossy(&made.stderr));
        fs::set_permissions(key, Permissions::from_mode(0o600)).with_context(|| key.display().to_string())
    }
}

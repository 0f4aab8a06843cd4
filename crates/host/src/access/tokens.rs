//! Tokens that authenticate requests over TCP: a file with one line `ROLE NAME HASH` per token. Owns the last contents of
//! the file; the tokens themselves are not stored.
//!
//! Invariant: the time to refuse a token reveals nothing about the known tokens.

use super::Role;
use crate::failure::Failure;
use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::RwLock;

/// Longest file.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Longest token.
const MAX_TOKEN_BYTES: usize = 512;

/// SHA-256 of a token.
pub type TokenHash = [u8; 32];

struct TokenEntry {
    role: Role,
    name: String,
    hash: TokenHash,
}

/// The owner of a token.
#[derive(Debug, PartialEq, Eq)]
pub struct TokenOwner {
    /// Name of the token.
    pub name: String,
    /// Its role.
    pub role: Role,
    /// Its hash.
    pub hash: TokenHash,
}

/// All known tokens.
pub struct Tokens(RwLock<Vec<TokenEntry>>);

impl Tokens {
    /// Reads a file that nobody else may read or write.
    pub fn load(path: &Path) -> Result<Tokens> {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        let found = file.metadata().with_context(|| path.display().to_string())?;
        if found.mode() & 0o027 != 0 {
            bail!(Failure::usage(format!(
                "{}: others may read it, or its group write it: chmod 0600",
                path.display()
            )));
        }
        let mut text = String::new();
        file.take(MAX_FILE_BYTES).read_to_string(&mut text).with_context(|| path.display().to_string())?;
        Tokens::parse(&text).map_err(|e| Failure::usage(format!("{}: {e}", path.display())).into())
    }

    /// Parses the lines of a file.
    pub(super) fn parse(text: &str) -> Result<Tokens> {
        let mut known: Vec<TokenEntry> = Vec::new();
        for (number, line) in text.lines().enumerate() {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let parts: Vec<&str> = line.split_whitespace().collect();
            let &[role, name, hash] = parts.as_slice() else {
                bail!("line {}: a line is ROLE NAME HASH, as 'spillway token new' prints it", number + 1);
            };
            let role = Role::of(role)
                .with_context(|| format!("line {}: roles are read, operate, admin", number + 1))?;
            let hash = bytes(hash)
                .with_context(|| format!("line {}: a hash has 64 hexadecimal digits", number + 1))?;
            let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.@".contains(&b));
            if !plain || name.len() > 64 || known.iter().any(|other| other.name == name) {
                bail!(
                    "line {}: a name has at most 64 letters, digits and -_.@, and is used once",
                    number + 1
                );
            }
            known.push(TokenEntry { role, name: name.into(), hash });
        }
        if known.is_empty() {
            bail!("there is no token in it: 'spillway token new' makes one");
        }
        Ok(Tokens(RwLock::new(known)))
    }

    /// Replaces all tokens by those of `others`.
    pub fn become_those(&self, others: Tokens) {
        let others = others.0.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        *self.0.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = others;
    }

    /// Returns the owner of a token.
    pub fn find(&self, token: &str) -> Option<TokenOwner> {
        if token.len() > MAX_TOKEN_BYTES {
            return None;
        }
        let hash = Sha256::digest(token.as_bytes()).into();
        self.owner(&hash).map(|(name, role)| TokenOwner { name, role, hash })
    }

    /// Returns the name and role of the owner of the token with this hash.
    pub fn owner(&self, hash: &TokenHash) -> Option<(String, Role)> {
        let all = self.0.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut found = None;
        for known in all.iter() {
            // Compare with all hashes in full, whatever was found.
            let differs = known.hash.iter().zip(hash).fold(0, |sum, (a, b)| sum | (a ^ *b));
            if std::hint::black_box(differs) == 0 {
                found = Some(known);
            }
        }
        found.map(|known| (known.name.clone(), known.role))
    }
}

fn bytes(hex: &str) -> Option<[u8; 32]> {
    if hex.len() != 64 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let mut out = [0; 32];
    for (at, byte) in out.iter_mut().enumerate() {
        *byte = u8::from_str_radix(hex.get(at * 2..at * 2 + 2)?, 16).ok()?;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// sha256 of "secret".
    const HASH: &str = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

    fn owner(tokens: &Tokens) -> Option<(String, Role)> {
        tokens.find("secret").map(|owner| (owner.name, owner.role))
    }

    #[test]
    fn a_token_is_found_by_its_hash() {
        let tokens =
            Tokens::parse(&format!("# ours\n\nread  eve  {}\noperate ci {HASH}\n", "0".repeat(64))).unwrap();
        assert_eq!(owner(&tokens), Some(("ci".into(), Role::Operate)));
        for wrong in ["", "secret ", "Secret", HASH, &"x".repeat(10_000)] {
            assert_eq!(tokens.find(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn those_that_were_read_last_hold() {
        let tokens = Tokens::parse(&format!("operate ci {HASH}\n")).unwrap();
        tokens.become_those(Tokens::parse(&format!("read other {HASH}\n")).unwrap());
        assert_eq!(owner(&tokens), Some(("other".into(), Role::Read)));
        tokens.become_those(Tokens::parse(&format!("read other {}\n", "0".repeat(64))).unwrap());
        assert_eq!(tokens.find("secret"), None);
    }

    #[test]
    fn what_is_no_line_is_refused() {
        let line = format!("admin a {HASH}\n");
        for (text, word) in [
            (String::new(), "no token"),
            ("# only this\n".into(), "no token"),
            ("admin a\n".into(), "line 1"),
            (format!("{line}root b {HASH}\n"), "line 2: roles"),
            (format!("admin a {}\n", &HASH[1..]), "64 hexadecimal"),
            (format!("admin a {}é\n", &HASH[2..]), "64 hexadecimal"),
            (format!("admin a/b {HASH}\n"), "a name"),
            (format!("{line}{line}"), "used once"),
        ] {
            let error = format!("{:#}", Tokens::parse(&text).err().unwrap());
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn others_may_not_read_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        std::fs::write(&path, format!("admin a {HASH}\n")).unwrap();
        for (mode, good) in [(0o600, true), (0o640, true), (0o644, false), (0o660, false), (0o602, false)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(Tokens::load(&path).is_ok(), good, "{mode:o}");
        }
    }
}

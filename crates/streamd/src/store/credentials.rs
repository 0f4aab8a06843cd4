//! Credentials of an S3 store: a file as AWS's tools have it. Owns its form. What it holds is never shown.

use std::fs::File;
use std::io::Read;

/// Largest file that is read, in bytes.
const MOST_BYTES: u64 = 64 << 10;

/// Keys for signing requests. No `Debug`: they appear in no log.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    pub access_key: String,
    pub secret_key: String,
    pub session_token: Option<String>,
}

impl Credentials {
    /// Reads the file's section `default`, or what is before any section.
    ///
    /// # Errors
    /// Why there are none, without any of the content.
    pub fn read(file: &File) -> Result<Credentials, String> {
        let mut text = String::new();
        let read = file.take(MOST_BYTES).read_to_string(&mut text);
        read.map_err(|e| format!("cannot be read: {e}"))?;
        Credentials::parse(&text)
    }

    fn parse(text: &str) -> Result<Credentials, String> {
        let (mut access_key, mut secret_key, mut session_token) = (None, None, None);
        let mut is_ours = true;
        for line in
            text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with(['#', ';']))
        {
            if let Some(section) = line.strip_prefix('[') {
                is_ours = section.trim_end_matches(']').trim() == "default";
                continue;
            }
            let Some((key, value)) = line.split_once('=').filter(|_| is_ours) else { continue };
            let value = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
            match key.trim() {
                "aws_access_key_id" => access_key = value,
                "aws_secret_access_key" => secret_key = value,
                "aws_session_token" => session_token = value,
                _ => {}
            }
        }
        let missing = |name: &str| {
            format!(
                "has no '{name} = ...' in its section [default]: it must be as AWS's tools write ~/.aws/credentials"
            )
        };
        Ok(Credentials {
            access_key: access_key.ok_or_else(|| missing("aws_access_key_id"))?,
            secret_key: secret_key.ok_or_else(|| missing("aws_secret_access_key"))?,
            session_token,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_aws_is_read_and_never_quoted() {
        let text = "# mine\n[other]\naws_access_key_id = no\n[default]\naws_access_key_id = AK\naws_secret_access_key=S=K\n";
        let read = Credentials::parse(text).ok().unwrap();
        assert_eq!((read.access_key.as_str(), read.secret_key.as_str()), ("AK", "S=K"));
        assert!(read.session_token.is_none());
        for text in
            ["", "secret", "[default]\naws_access_key_id = AKIA", "[other]\naws_access_key_id = AKIA\n"]
        {
            let why = Credentials::parse(text).err().unwrap();
            assert!(
                why.contains("section [default]") && !why.contains("AKIA") && !why.contains("secret\n"),
                "{why}"
            );
        }
    }
}

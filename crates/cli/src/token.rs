//! `spillway token new`: a token for spillwayd's TCP port, and the line of it that its file of tokens wants. Keeps neither.
//!
//! Invariant: a token is of 256 random bits, and the line holds its hash alone.

use crate::error::{Exit, Failure};
use crate::output;
use clap::{Args, Subcommand, ValueEnum};
use sha2::{Digest, Sha256};
use spillway_control::secret;

/// What to do with tokens.
#[derive(Debug, Subcommand)]
pub enum TokenCommand {
    /// Create a token: prints the token, which is shown only once, and the line for spillwayd's file of --tokens
    #[command(after_help = NEW_EXAMPLES)]
    New(New),
}

const NEW_EXAMPLES: &str = "\
Example:
  spillway token new --role read prometheus --json > token.json
  jq -r .line token.json >> /etc/spillway/tokens; systemctl reload spillwayd";

/// Options of `token new`.
#[derive(Debug, Args)]
pub struct New {
    /// What the token allows
    #[arg(long, value_enum)]
    role: RoleWord,
    /// Name of the token's owner, for the audit log: letters, digits and -_.@, at most 64
    #[arg(value_parser = name)]
    name: String,
    /// Print one JSON object: token, line
    #[arg(long)]
    json: bool,
}

/// What a token allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RoleWord {
    /// Read everything but secrets
    Read,
    /// Also start, stop, reset, claim and release machines
    Operate,
    /// Everything
    Admin,
}

fn name(text: &str) -> Result<String, String> {
    let plain = text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.@".contains(&b));
    match plain && (1..=64).contains(&text.len()) {
        true => Ok(text.into()),
        false => Err("a name has letters, digits and -_.@, at most 64".into()),
    }
}

/// Does it.
pub fn token(command: &TokenCommand) -> Result<(), Failure> {
    let TokenCommand::New(new) = command;
    let token = secret::random()
        .map_err(|e| Failure::new(Exit::Internal, format!("no random bytes for a token: {e}")))?;
    let role = new.role.to_possible_value().expect("no role is hidden");
    let line = format!("{} {} {}", role.get_name(), new.name, hash(&token));
    let text = match new.json {
        true => format!("{:#}\n", serde_json::json!({ "token": token, "line": line })),
        false => format!("token  {token}\nline   {line}\n"),
    };
    output::print(&text).map(drop)
}

fn hash(token: &str) -> String {
    format!("{:x}", Sha256::digest(token))
}

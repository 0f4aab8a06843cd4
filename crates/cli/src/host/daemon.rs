//! Where the daemon is, and who asks it: at a socket whoever may open it, over TCP whoever has a token.
//!
//! Invariant: a token is never an argument, which every user of this host could read; and an option that would have no
//! effect is an error.

use crate::error::{Exit, Failure};
use crate::output;
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use serde::Serialize;
use spillway_api::client::{Address, AddressError, Client, Token};
use spillway_api::{CA_VARIABLE, DEFAULT_SOCKET, SOCKET_VARIABLE, TOKEN_VARIABLE};
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Where the daemon is.
#[derive(Debug, Args)]
pub struct Daemon {
    /// Socket that spillwayd listens on; of another host's, https://HOST:PORT
    #[arg(long, global = true, value_name = "SOCK", env = SOCKET_VARIABLE, default_value = DEFAULT_SOCKET, value_parser = address())]
    socket: Address,
    /// With https: a file with the token that says who asks [default: the token in SPILLWAY_TOKEN]
    #[arg(long, global = true, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// With https: the certificates (PEM) one of which has signed spillwayd's [default: the file in SPILLWAY_CA, else the system's]
    #[arg(long, global = true, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
}

fn address() -> impl TypedValueParser<Value = Address> {
    OsStringValueParser::new().try_map(|text: OsString| -> Result<Address, AddressError> {
        // A variable that is set to nothing says nothing.
        if text.is_empty() { Ok(Address::Socket(DEFAULT_SOCKET.into())) } else { Address::parse(&text) }
    })
}

impl Daemon {
    /// Its socket, for what must be done on the daemon's own host.
    pub fn local(&self, what: &str) -> Result<&Path, Failure> {
        match &self.socket {
            Address::Socket(path) => Ok(path),
            Address::Remote(remote) => Err(Failure::usage(format!(
                "{what} works on spillwayd's own host, and this would ask {remote}: run it there, with the path of its socket"
            ))),
        }
    }

    /// Who asks it.
    pub fn client(&self) -> Result<Client, Failure> {
        match &self.socket {
            Address::Socket(path) => {
                let given = [("--token-file", &self.token_file), ("--ca", &self.ca)];
                if let Some((option, _)) = given.iter().find(|(_, file)| file.is_some()) {
                    let socket = path.display();
                    return Err(Failure::usage(format!(
                        "{option} is for --socket https://HOST:PORT, and this asks {socket}: leave one of them out"
                    )));
                }
                let cannot = |e| Failure::new(Exit::Internal, format!("cannot ask spillwayd: {e}"));
                Client::new(path).map_err(cannot)
            }
            Address::Remote(remote) => {
                let ca = variable(CA_VARIABLE).map(PathBuf::from);
                let ca = self.ca.as_ref().or(ca.as_ref());
                Ok(Client::remote(remote.clone(), self.token()?, ca.map(PathBuf::as_path))?)
            }
        }
    }

    fn token(&self) -> Result<Token, Failure> {
        match (&self.token_file, variable(TOKEN_VARIABLE)) {
            (Some(file), _) => Ok(Token::load(file)?),
            (None, Some(token)) => {
                let token = Token::new(token.to_str().unwrap_or_default());
                token.map_err(|e| Failure::usage(format!("{TOKEN_VARIABLE}: {e}")))
            }
            (None, None) => Err(Failure::usage(format!(
                "{} wants to know who asks: give a token in {TOKEN_VARIABLE} or by --token-file FILE",
                self.socket
            ))),
        }
    }

    /// Shows an answer: as JSON, or in words.
    pub fn show<T: Serialize>(&self, answer: &T, words: impl FnOnce(&T) -> String) -> Result<(), Failure> {
        self.shows(answer, words).map(drop)
    }

    /// The same. `false`: nobody reads it.
    pub fn shows<T: Serialize>(&self, answer: &T, words: impl FnOnce(&T) -> String) -> Result<bool, Failure> {
        let text = if self.json {
            format!("{}\n", serde_json::to_string_pretty(answer).expect("an answer is plain data"))
        } else {
            words(answer)
        };
        output::print(&text)
    }
}

/// A variable that is set to something.
fn variable(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

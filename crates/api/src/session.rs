//! Sessions: who a caller is, and how a browser gets a cookie for a token.

use crate::bounds::{Bounded, OutOfBounds};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Who the caller of a request is, and what it may do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Session {
    /// Name of the token, or the user of the unix socket: `uid 0`. Of a user of another host of the fleet: `ci (at host-a)`.
    pub caller: String,
    /// Role of the caller: that of its token, or `admin` on the unix socket.
    pub role: SessionRole,
    /// How the caller has shown who it is.
    pub by: SessionProof,
    /// Seconds until the session ends; null if the caller has none.
    pub seconds_left: Option<u64>,
}

/// What a caller may do. Each role includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SessionRole {
    /// Read everything but secrets.
    Read,
    /// Start, stop, reset, claim and release machines, and use their consoles.
    Operate,
    /// Everything.
    Admin,
}

/// How a caller has shown who it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SessionProof {
    /// It has opened the unix socket.
    Socket,
    /// A token in the header of the request.
    Token,
    /// The cookie of a session.
    Session,
    /// Another host of the fleet, which has passed the request on, has identified it.
    Fleet,
}

/// A token that a session is to stand for.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSession {
    /// The token, as `spillway token new` has printed it.
    #[schema(max_length = 512)]
    pub token: String,
}

impl Bounded for NewSession {
    fn check_bounds(&self) -> Result<(), OutOfBounds> {
        Ok(())
    }
}

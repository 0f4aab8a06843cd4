//! Words of the API as values of options. They are defined once, in `spillway_api`.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde::Serialize;
use serde::de::DeserializeOwned;
use spillway_api::bounds::Bounds;
use spillway_api::{Name, Network, parse_size};
use std::str::FromStr;

/// Word of a value.
pub fn word<T: Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        other => unreachable!("a plain enumeration is a word, not {other:?}"),
    }
}

/// Shortens a text for a table to so many characters.
pub fn shortened(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.to_owned(),
    }
}

/// Residencies of streamed versions, from none of the chunks to all.
pub const RESIDENCIES: &[&str] = &["lazy", "boot", "full"];

/// Parser that accepts these words.
pub fn words<T: DeserializeOwned + Clone + Send + Sync + 'static>(
    all: &'static [&'static str],
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(all)
        .map(|word| serde_json::from_value(serde_json::Value::String(word)).expect("each of them is a word"))
}

/// Parser for a size within its bounds.
pub fn size(bounds: &'static Bounds) -> impl Fn(&str) -> Result<u64, String> + Clone {
    move |text| {
        let bytes = parse_size(text).map_err(|e| e.to_string())?;
        bounds.check_value(bytes).map(|()| bytes).map_err(|e| e.to_string())
    }
}

/// Parser for a number within its bounds.
pub fn number(bounds: &'static Bounds) -> impl Fn(&str) -> Result<u32, String> + Clone {
    move |text| {
        let number: u32 = text.parse().map_err(|_| format!("allowed is a whole number, {bounds}"))?;
        bounds.check_value(number.into()).map(|()| number).map_err(|e| e.to_string())
    }
}

/// Parses a label such as `team=sales`.
pub fn label(text: &str) -> Result<(Name, String), String> {
    let (key, value) = text.split_once('=').ok_or("a label is KEY=VALUE")?;
    Ok((key.parse().map_err(|e| format!("{e}"))?, value.to_owned()))
}

/// Network as an option: `user`, `none`, `bridge=br0`.
#[derive(Clone, Debug)]
pub struct NetworkWord(pub Network);

impl FromStr for NetworkWord {
    type Err = String;

    fn from_str(text: &str) -> Result<NetworkWord, String> {
        match (text, text.strip_prefix("bridge=")) {
            ("user", _) => Ok(NetworkWord(Network::User)),
            ("none", _) => Ok(NetworkWord(Network::None)),
            (_, Some(bridge)) => Ok(NetworkWord(Network::Bridge(bridge.into()))),
            _ => Err("a network is user, none or bridge=NAME".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::settings::{BASE_CACHES, FULL, MODES};
    use crate::host::catalog::hardware::{DISPLAYS, FIRMWARE, GUESTS, TPMS, VIDEOS, VMMS, WATCHDOGS};
    use crate::host::catalog::settings::{KINDS, RESETS};
    use crate::host::fleet::catalog::settings::{IDENTITIES, ISOLATION_ACTIONS, SPREADS};
    use spillway_api::{
        BaseCache, CatalogKind, DiskMode, DisplayKind, Firmware, FullPolicy, GuestSystem, IdentityKind,
        IsolationAction, ResetEvent, Spread, Tpm, Video, VmmKind, WatchdogAction,
    };

    #[test]
    fn a_long_text_is_cut_at_a_character() {
        assert_eq!(["", "éé", "ééé"].map(|text| shortened(text, 2)), ["", "éé", "éé..."]);
    }

    #[test]
    fn every_word_is_one() {
        fn all<T: Serialize + DeserializeOwned>(words: &[&str]) {
            for text in words {
                let value: T = serde_json::from_value(serde_json::Value::String(text.to_string())).unwrap();
                assert_eq!(word(&value), *text);
            }
        }
        all::<DiskMode>(MODES);
        all::<CatalogKind>(KINDS);
        all::<FullPolicy>(FULL);
        all::<BaseCache>(BASE_CACHES);
        all::<ResetEvent>(RESETS);
        all::<DisplayKind>(DISPLAYS);
        all::<VmmKind>(VMMS);
        all::<GuestSystem>(GUESTS);
        all::<Firmware>(FIRMWARE);
        all::<Tpm>(TPMS);
        all::<Video>(VIDEOS);
        all::<WatchdogAction>(WATCHDOGS);
        all::<Spread>(SPREADS);
        all::<IdentityKind>(IDENTITIES);
        all::<IsolationAction>(ISOLATION_ACTIONS);
    }
}

//! Colours by their role, and pictures that take them from the page they stand in.
//!
//! Invariant: every colour of a picture is one of [`ROLES`], so that a page can replace each by its own. Whoever knows no
//! style sheets still sees the light ones.

use crate::markup::escaped;
use plotters::style::RGBColor;
use std::fmt::Write;

/// What is drawn with a colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Words that must be read.
    Ink,
    /// Words beside.
    Soft,
    /// Lines behind the data.
    Grid,
    /// A scenario, by its place in the study.
    Series(usize),
}

/// A role's name in style sheets, its colour on light paper, and on dark.
type Colours = (&'static str, u32, u32);

/// Of [`Role::Series`]: told apart by people who do not see all colours (after Okabe and Ito), at least 3:1 against the
/// paper.
const SERIES: [Colours; 7] = [
    ("s0", 0x5b_6470, 0xaa_b4c0),
    ("s1", 0x00_72b2, 0x4d_b2f0),
    ("s2", 0xd5_5e00, 0xff_8f45),
    ("s3", 0x00_8562, 0x2f_c79a),
    ("s4", 0xb0_4f8c, 0xe7_9bc4),
    ("s5", 0x8f_6b00, 0xe6_c229),
    ("s6", 0x62_3fa0, 0xb4_9af0),
];
const ROLES: [Colours; 4] = [
    ("paper", 0xff_ffff, 0x0f_141a),
    ("ink", 0x1f_2328, 0xe6_edf3),
    ("soft", 0x56_5f69, 0x9d_a7b3),
    ("grid", 0xd4_dae1, 0x32_3a44),
];

impl Role {
    fn colours(self) -> Colours {
        match self {
            Role::Ink => ROLES[1],
            Role::Soft => ROLES[2],
            Role::Grid => ROLES[3],
            Role::Series(place) => SERIES[place % SERIES.len()],
        }
    }

    /// For drawing.
    pub fn colour(self) -> RGBColor {
        let [_, r, g, b] = self.colours().1.to_be_bytes();
        RGBColor(r, g, b)
    }
}

/// The colours for a style sheet: their values on light and dark, and the classes that pictures use.
pub fn style() -> String {
    let all = || ROLES.iter().chain(&SERIES);
    let values = |dark: bool| {
        all().fold(String::new(), |mut out, (name, light, night)| {
            put(&mut out, format_args!("--{name}:#{:06x};", if dark { night } else { light }));
            out
        })
    };
    let mut out = format!(
        ":root{{{}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{}}}}}\n",
        values(false),
        values(true)
    );
    for (name, ..) in all() {
        put(&mut out, format_args!(".f-{name}{{fill:var(--{name})}}.l-{name}{{stroke:var(--{name})}}\n"));
    }
    out
}

/// Gives each colour the class of its role.
pub fn with_roles(drawn: &str) -> String {
    let mut out = drawn.to_string();
    for (name, light, _) in ROLES.iter().chain(&SERIES) {
        for (attribute, class) in [("fill", "f"), ("stroke", "l")] {
            let colour = format!("{attribute}=\"#{light:06X}\"");
            out = out.replace(&colour, &format!("{colour} class=\"{class}-{name}\""));
        }
    }
    out
}

/// A picture: what is inside of its `svg` element, and how large.
pub struct Picture {
    /// What it shows, for those who do not see it.
    pub label: String,
    /// The width of its own units.
    pub width: u32,
    /// The height.
    pub height: u32,
    /// Elements.
    pub body: String,
}

impl Picture {
    /// For a page that has [`style`].
    pub fn inline(&self) -> String {
        let Picture { label, width, height, body } = self;
        format!(
            "<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">\n{body}</svg>\n",
            escaped(label)
        )
    }

    /// A file of its own, with its title on top.
    pub fn alone(&self) -> String {
        let Picture { label, width, height, body } = self;
        let title = 56;
        let all = height + title;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {all}\" width=\"{}\" height=\"{}\">\n\
             <title>{words}</title>\n<style>{}</style>\n\
             <rect width=\"{width}\" height=\"{all}\" fill=\"#FFFFFF\" class=\"f-paper\"/>\n\
             <text x=\"12\" y=\"36\" font-family=\"sans-serif\" font-size=\"26\" font-weight=\"bold\" \
             fill=\"#1F2328\" class=\"f-ink\"{fit}>{words}</text>\n\
             <g transform=\"translate(0 {title})\">\n{body}</g>\n</svg>\n",
            width / 2,
            all / 2,
            style(),
            words = escaped(label),
            fit = match label.chars().count() {
                n if n * 16 > *width as usize =>
                    format!(" textLength=\"{}\" lengthAdjust=\"spacingAndGlyphs\"", width.saturating_sub(24)),
                _ => String::new(),
            },
        )
    }
}

/// Cut to a number of characters.
pub fn cut(words: &str, most: usize) -> String {
    match words.chars().count() {
        n if n <= most => words.to_string(),
        _ => words.chars().take(most.saturating_sub(1)).chain(['\u{2026}']).collect(),
    }
}

fn put(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _ = out.write_fmt(text);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// WCAG's contrast of two colours.
    fn contrast(a: u32, b: u32) -> f64 {
        let light = |colour: u32| {
            let channel = |shift: u32| {
                let c = f64::from(colour >> shift & 0xff) / 255.0;
                if c <= 0.040_45 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) }
            };
            0.2126 * channel(16) + 0.7152 * channel(8) + 0.0722 * channel(0) + 0.05
        };
        let (a, b) = (light(a), light(b));
        a.max(b) / a.min(b)
    }

    #[test]
    fn colours_can_be_seen_on_their_paper() {
        let [paper, ink, soft, _] = ROLES;
        for (name, light, dark) in SERIES {
            assert!(contrast(light, paper.1) >= 3.0 && contrast(dark, paper.2) >= 3.0, "{name}");
        }
        for (name, light, dark) in [ink, soft] {
            assert!(contrast(light, paper.1) >= 4.5 && contrast(dark, paper.2) >= 4.5, "{name}");
        }
    }

    #[test]
    fn every_colour_gets_its_class() {
        let drawn = "<rect fill=\"#FFFFFF\"/><line stroke=\"#0072B2\"/><path fill=\"none\"/>";
        let expected = "<rect fill=\"#FFFFFF\" class=\"f-paper\"/><line stroke=\"#0072B2\" class=\"l-s1\"/>\
                        <path fill=\"none\"/>";
        assert_eq!(with_roles(drawn), expected);
        assert!(style().contains(".l-s1{stroke:var(--s1)}") && style().contains("--s6:#b49af0;"));
    }

    #[test]
    fn words_stay_words() {
        assert_eq!((cut("abcdef", 4), cut("abc", 4)), ("abc\u{2026}".into(), "abc".into()));
        let picture =
            Picture { label: "</title><script>".into(), width: 10, height: 10, body: String::new() };
        assert!(!picture.inline().contains("<script") && !picture.alone().contains("<script"));
    }
}

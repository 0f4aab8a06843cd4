//! What all pictures share: colours by their role, text, the points of series, axes, and the form of a file.
//!
//! Invariant: every colour of a picture is one of [`ROLES`] or [`SERIES`], so that a page can replace each by its own. A viewer that knows
//! no style sheets shows the light colours.

mod axis;

pub(crate) use axis::Axis;

use crate::template;
use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde::Serialize;
use std::fmt::Write;

/// Where a picture is drawn.
pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// Height of text.
pub(crate) const TEXT: u32 = 26;
/// Width of a character of [`TEXT`], averaged over a word, at most.
pub(crate) const CHARACTER: i32 = 16;

/// What is drawn with a colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Text that must be read.
    Ink,
    /// Text that explains.
    Soft,
    /// Lines behind the data.
    Grid,
    /// A series, by its place in the list of all.
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

    /// The colour on light paper.
    pub fn colour(self) -> RGBColor {
        let [_, r, g, b] = self.colours().1.to_be_bytes();
        RGBColor(r, g, b)
    }
}

/// The colours for a style sheet: their values on light and dark, and the classes that pictures use.
pub(crate) fn style() -> String {
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
fn with_roles(drawn: &str) -> String {
    let mut out = drawn.to_string();
    for (name, light, _) in ROLES.iter().chain(&SERIES) {
        for (attribute, class) in [("fill", "f"), ("stroke", "l")] {
            let colour = format!("{attribute}=\"#{light:06X}\"");
            out = out.replace(&colour, &format!("{colour} class=\"{class}-{name}\""));
        }
    }
    out
}

/// A drawn picture.
#[derive(Serialize)]
pub(crate) struct Picture {
    /// What it shows, for readers who cannot see it, and as the title of its file.
    pub label: String,
    /// Width of the coordinate system.
    pub width: u32,
    /// Height of the coordinate system.
    pub height: u32,
    /// The elements inside of the `svg` element.
    pub body: String,
}

impl Picture {
    /// Draws on a new area of this size. The backend draws in whole units: they are half of a pixel as pictures are shown.
    pub fn draw(
        label: &str,
        (width, height): (u32, u32),
        draw: impl FnOnce(&Area) -> Result<()>,
    ) -> Result<Picture> {
        let mut drawn = String::new();
        {
            let root = SVGBackend::with_string(&mut drawn, (width, height)).into_drawing_area();
            draw(&root)?;
            root.present()?;
        }
        // The backend's own `svg` element goes.
        let body = drawn.split_once(">\n").map_or("", |(_, body)| body);
        let body = with_roles(body.trim_end().trim_end_matches("</svg>"));
        Ok(Picture { label: label.into(), width, height, body })
    }

    /// The picture as a file of its own, with its label as a title on top.
    pub fn file(&self) -> Result<String> {
        #[derive(Serialize)]
        struct Values<'a> {
            width: u32,
            height: u32,
            shown_width: u32,
            shown_height: u32,
            head_height: u32,
            title: &'a str,
            fit_width: Option<u32>,
            style: String,
            body: &'a str,
        }
        let Picture { label, width, height, body } = self;
        let head_height = 56;
        let height = height + head_height;
        // A long title is drawn narrower.
        let is_long = label.chars().count() * 16 > *width as usize;
        let values = Values {
            width: *width,
            height,
            shown_width: width / 2,
            shown_height: height / 2,
            head_height,
            title: label,
            fit_width: is_long.then_some(width.saturating_sub(24)),
            style: style(),
            body,
        };
        template::render("picture.svg", include_str!("picture.svg"), &values)
    }
}

/// Draws text at a place, which is the middle of its height.
pub(crate) fn draw_text(area: &Area, text: &str, at: (i32, i32), role: Role, side: HPos) -> Result<()> {
    let style = ("sans-serif", f64::from(TEXT) * 1.24).into_font().color(&role.colour());
    area.draw(&Text::new(text.to_string(), at, style.pos(Pos::new(side, VPos::Center))))?;
    Ok(())
}

/// Draws a point of a series, in the colour and the form that belong to its place.
pub(crate) fn draw_point(area: &Area, (x, y): (i32, i32), place: usize) -> Result<()> {
    let colour = Role::Series(place).colour();
    let corners = |offsets: &[(i32, i32)]| {
        Polygon::new(offsets.iter().map(|(dx, dy)| (x + dx, y + dy)).collect::<Vec<_>>(), colour)
    };
    match place % SERIES.len() {
        0 => area.draw(&Circle::new((x, y), 9, colour.filled()))?,
        1 => area.draw(&corners(&[(-9, -9), (9, -9), (9, 9), (-9, 9)]))?,
        2 => area.draw(&corners(&[(0, -12), (11, 9), (-11, 9)]))?,
        3 => area.draw(&corners(&[(0, -13), (11, 0), (0, 13), (-11, 0)]))?,
        4 => area.draw(&corners(&[(0, 12), (11, -9), (-11, -9)]))?,
        5 => area.draw(&corners(&[(-5, -12), (5, -12), (5, 12), (-5, 12)]))?,
        _ => area.draw(&Circle::new((x, y), 10, colour.stroke_width(4)))?,
    }
    Ok(())
}

/// Cuts text to a number of characters.
pub(crate) fn cut(text: &str, most: usize) -> String {
    match text.chars().count() {
        n if n <= most => text.to_string(),
        _ => text.chars().take(most.saturating_sub(1)).chain(['\u{2026}']).collect(),
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
    fn labels_are_cut_and_escaped() {
        assert_eq!((cut("abcdef", 4), cut("abc", 4)), ("abc\u{2026}".into(), "abc".into()));
        let picture =
            Picture { label: "</title><script>".into(), width: 10, height: 10, body: String::new() };
        let file = picture.file().unwrap();
        assert!(
            !file.contains("<script") && file.contains("<title>&lt;&#x2f;title&gt;&lt;script&gt;</title>"),
            "{file}"
        );
    }
}

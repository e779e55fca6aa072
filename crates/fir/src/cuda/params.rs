//! Parameters of kernels: a Rust struct that is laid out as its C++ twin, and knows its fields.
//!
//! The fields serve twice: the compiled text asserts that the twin has each at the same offset, and a dry run shows
//! them by name.

use std::borrow::Cow;

use bytemuck::{Pod, Zeroable};

/// An address on a device; 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub(crate) struct Address(pub(crate) u64);

/// How a field is shown.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Address,
    F32,
    F64,
    I32,
    U32,
    U64,
    /// A [`TensorMap`].
    Map,
    /// So many of one kind.
    Array(&'static Kind, usize),
    /// Parameters within parameters.
    Fields(&'static [Field]),
}

impl Kind {
    /// Bytes of an element of an array: no arrays of structs.
    fn size(self) -> usize {
        match self {
            Self::F32 | Self::I32 | Self::U32 => 4,
            _ => 8,
        }
    }
}

/// A field of a struct of parameters; its name is how C++ reaches it, as in `out.lse`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) offset: usize,
    pub(crate) kind: Kind,
}

/// How the copy engine sees a tensor: the driver's bytes, which nobody else reads. All zeros on a dry run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub(crate) struct TensorMap(pub(crate) [u64; 16]);

impl Scalar for TensorMap {
    const KIND: Kind = Kind::Map;
}

/// Types that a field may have.
pub(crate) trait Scalar: Pod {
    const KIND: Kind;
}

macro_rules! scalars {
    ($($t:ty => $kind:ident),*) => {$(
        impl Scalar for $t {
            const KIND: Kind = Kind::$kind;
        }
    )*};
}
scalars! { Address => Address, f32 => F32, f64 => F64, i32 => I32, u32 => U32, u64 => U64 }

macro_rules! arrays {
    ($($t:ty, $n:literal);*) => {$(
        impl Scalar for [$t; $n] {
            const KIND: Kind = Kind::Array(&<$t>::KIND, $n);
        }
    )*};
}
arrays! { u32, 2; u32, 5; u64, 2; u64, 10 }

impl<P: Params> Scalar for P {
    const KIND: Kind = Kind::Fields(P::FIELDS);
}

/// A kernel's parameter.
pub(crate) trait Params: Pod {
    /// Its C++ type.
    const TYPE: &'static str;
    const FIELDS: &'static [Field];
}

/// A type of parameters, for a kernel's source.
#[derive(Clone, Debug)]
pub(crate) struct Twin {
    pub(crate) cpp: Cow<'static, str>,
    pub(crate) size: usize,
    pub(crate) fields: &'static [Field],
    /// Fields whose names are known when the program runs, such as a variant's.
    pub(crate) named: Vec<(String, usize, Kind)>,
}

impl Twin {
    pub(crate) const fn of<P: Params>() -> Self {
        Self { cpp: Cow::Borrowed(P::TYPE), size: size_of::<P>(), fields: P::FIELDS, named: Vec::new() }
    }

    /// Name, offset and kind of every field.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&str, usize, Kind)> {
        let fixed = self.fields.iter().map(|f| (f.name, f.offset, f.kind));
        fixed.chain(self.named.iter().map(|(name, offset, kind)| (&**name, *offset, *kind)))
    }

    /// C++ text that fails to compile unless the twins agree.
    pub(crate) fn assertions(&self) -> String {
        let mut text = format!("static_assert(sizeof({}) == {}, \"size\");\n", self.cpp, self.size);
        for (name, offset, kind) in self.all() {
            self.assert(name, offset, kind, &mut text);
        }
        text
    }

    fn assert(&self, name: &str, offset: usize, kind: Kind, text: &mut String) {
        // NVRTC has no offsetof; this is what one is made of in its front end.
        let at = format!("__INTADDR__(&static_cast<{}*>(nullptr)->{name})", self.cpp);
        *text += &format!("static_assert({at} == {offset}, \"{name}\");\n");
        if let Kind::Fields(inner) = kind {
            inner.iter().for_each(|f| self.assert(&format!("{name}.{}", f.name), offset + f.offset, f.kind, text));
        }
    }
}

/// Declares a struct of parameters with the C++ type that it is the twin of. A field inside of a struct in C++ is written
/// with its name there: `lse in "out.lse": Address`.
macro_rules! params {
    (@name $field:ident) => { stringify!($field) };
    (@name $field:ident $path:literal) => { $path };
    ($(#[$doc:meta])* $visible:vis struct $name:ident = $cpp:literal {
        $($(#[$field_doc:meta])* $field:ident $(in $path:literal)?: $ty:ty,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
        #[repr(C)]
        $visible struct $name {
            $($(#[$field_doc])* $visible $field: $ty,)*
        }
        impl $crate::cuda::params::Params for $name {
            const TYPE: &'static str = $cpp;
            const FIELDS: &'static [$crate::cuda::params::Field] = &[$($crate::cuda::params::Field {
                name: $crate::cuda::params::params!(@name $field $($path)?),
                offset: std::mem::offset_of!($name, $field),
                kind: <$ty as $crate::cuda::params::Scalar>::KIND,
            },)*];
        }
    };
}
pub(crate) use params;

/// The fields of `bytes` as text; `name` turns an address into the argument that it lies in.
pub(crate) fn show(bytes: &[u8], twin: &Twin, name: &dyn Fn(u64) -> String) -> String {
    show_fields(bytes, twin.all(), name)
}

fn show_fields<'a>(
    bytes: &[u8],
    fields: impl Iterator<Item = (&'a str, usize, Kind)>,
    name: &dyn Fn(u64) -> String,
) -> String {
    let all = fields.map(|(field, offset, kind)| format!("{field} {}", show_value(&bytes[offset..], kind, name)));
    all.collect::<Vec<_>>().join(", ")
}

fn show_value(bytes: &[u8], kind: Kind, name: &dyn Fn(u64) -> String) -> String {
    let word = |n: usize| bytes[..n].iter().rev().fold(0u64, |sum, &b| sum << 8 | u64::from(b));
    match kind {
        Kind::Address => name(word(8)),
        Kind::F32 => f32::from_bits(word(4) as u32).to_string(),
        Kind::F64 => f64::from_bits(word(8)).to_string(),
        Kind::I32 => (word(4) as i32).to_string(),
        Kind::U32 => word(4).to_string(),
        Kind::U64 => word(8).to_string(),
        Kind::Map => "map".into(),
        Kind::Array(of, n) => {
            let all: Vec<_> = (0..n).map(|i| show_value(&bytes[i * of.size()..], *of, name)).collect();
            format!("[{}]", all.join(", "))
        }
        Kind::Fields(fields) => {
            format!("{{{}}}", show_fields(bytes, fields.iter().map(|f| (f.name, f.offset, f.kind)), name))
        }
    }
}

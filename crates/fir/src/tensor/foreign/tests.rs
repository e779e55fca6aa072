use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::place::DeviceMemory;
use super::*;
use crate::tensor::dlpack::{DlDataType, FLAG_COPIED};

const DTYPES: [DType; 14] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::E4M3,
    DType::E5M2,
    DType::E8M0,
    DType::E2M1x2,
    DType::I8,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::U8,
    DType::U32,
    DType::Bool,
];

fn tensor(dtype: DType, shape: &[usize]) -> Tensor {
    let mut t = Tensor::zeros(dtype, shape).unwrap();
    for (i, b) in t.view_mut().into_host_bytes("", "").unwrap().iter_mut().enumerate() {
        *b = (i * 37 + 11) as u8;
    }
    t
}

/// A producer that counts the calls of its deleter. The data and the shape are its own; the test edits the rest.
struct Producer {
    managed: DlManagedTensorVersioned,
    data: Vec<u64>,
    shape: Vec<i64>,
    strides: Vec<i64>,
    deleted: Arc<AtomicUsize>,
}

unsafe extern "C" fn count_and_free(this: *mut DlManagedTensorVersioned) {
    // SAFETY: `produce` made it with its own box as context, and `Foreign` calls the deleter once.
    let p = unsafe { Box::from_raw((*this).manager_ctx.cast::<Producer>()) };
    p.deleted.fetch_add(1, Ordering::Relaxed);
}

/// A `[shape]` tensor of f32 over 16 words, changed by `edit`.
fn produce(
    shape: &[i64],
    strides: &[i64],
    deleted: &Arc<AtomicUsize>,
    edit: impl FnOnce(&mut DlManagedTensorVersioned),
) -> *mut DlManagedTensorVersioned {
    let p = Box::into_raw(Box::new(Producer {
        managed: DlManagedTensorVersioned {
            version: DlVersion { major: 1, minor: 0 },
            manager_ctx: ptr::null_mut(),
            deleter: Some(count_and_free),
            flags: 0,
            dl_tensor: DlTensor {
                data: ptr::null_mut(),
                device: DlDevice { device_type: 1, device_id: 0 },
                ndim: shape.len() as i32,
                dtype: DType::F32.into(),
                shape: ptr::null_mut(),
                strides: ptr::null_mut(),
                byte_offset: 0,
            },
        },
        data: (0..16u32).map(|i| u64::from((2 * i) as f32 as u32) | u64::from(i) << 32).collect(),
        shape: shape.to_vec(),
        strides: strides.to_vec(),
        deleted: Arc::clone(deleted),
    }));
    // SAFETY: the box was made above, and nobody else refers to it.
    let q = unsafe { &mut *p };
    let floats: &mut [f32] = bytemuck::cast_slice_mut(&mut q.data);
    for (i, x) in floats.iter_mut().enumerate() {
        *x = i as f32;
    }
    q.managed.manager_ctx = p.cast();
    q.managed.dl_tensor.data = q.data.as_mut_ptr().cast::<c_void>();
    q.managed.dl_tensor.shape = q.shape.as_mut_ptr();
    if !strides.is_empty() {
        q.managed.dl_tensor.strides = q.strides.as_mut_ptr();
    }
    edit(&mut q.managed);
    &raw mut q.managed
}

#[test]
fn every_dtype_comes_back_from_both_versions() {
    for dtype in DTYPES {
        for shape in [&[][..], &[5], &[2, 3], &[1, 2, 1, 3, 1, 2], &[3, 0, 2]] {
            let t = tensor(dtype, shape);
            // SAFETY: the pointers come from `into_raw` and are given away.
            let versioned = unsafe { Foreign::from_dlpack(t.clone().into_dlpack().into_raw()) };
            // SAFETY: as above.
            let old = unsafe { Foreign::from_dlpack_unversioned(t.clone().into_dlpack_unversioned().into_raw()) };
            for mut f in [versioned.unwrap(), old.unwrap()] {
                assert_eq!((f.dtype(), f.layout().shape(), f.is_read_only()), (dtype, shape, false));
                assert_eq!(
                    f.view().unwrap().host_bytes("", "").unwrap(),
                    t.view().host_bytes("", "").unwrap(),
                    "{dtype} {shape:?}"
                );
                let view = f.view_mut().unwrap();
                if dtype == DType::U32 {
                    view.typed::<u32>("t", "x").unwrap().data().fill(7);
                    assert!(f.view().unwrap().typed::<u32>("t", "x").unwrap().data().iter().all(|&x| x == 7));
                }
            }
        }
    }
}

#[test]
fn an_export_that_nobody_takes_is_freed() {
    // Miri's leak check is what can fail here.
    drop(tensor(DType::F32, &[4]).into_dlpack());
    drop(tensor(DType::F32, &[0]).into_dlpack_unversioned());
}

#[test]
fn an_export_says_what_the_standard_asks() {
    let raw = tensor(DType::BF16, &[2, 3]).into_dlpack().into_raw();
    // SAFETY: `into_raw` gave a live managed tensor; it is freed at the end.
    let m = unsafe { &*raw };
    assert_eq!((m.version.major, m.flags, m.dl_tensor.ndim, m.dl_tensor.byte_offset), (1, 0, 2, 0));
    assert_eq!(m.dl_tensor.dtype, DlDataType { code: 4, bits: 16, lanes: 1 });
    assert_eq!(m.dl_tensor.data.addr() % 64, 0);
    // SAFETY: both have `ndim` entries.
    let (shape, strides) = unsafe {
        (std::slice::from_raw_parts(m.dl_tensor.shape, 2), std::slice::from_raw_parts(m.dl_tensor.strides, 2))
    };
    assert_eq!((shape, strides), (&[2, 3][..], &[3, 1][..]));
    // SAFETY: the only use of the deleter; `m` is not used again.
    unsafe { (m.deleter.unwrap())(raw) };

    let raw = tensor(DType::BF16, &[0, usize::MAX]).into_dlpack().into_raw();
    // SAFETY: as above.
    unsafe {
        assert!((*raw).dl_tensor.data.is_null());
        assert_eq!(*(*raw).dl_tensor.shape.add(1), i64::MAX);
        ((*raw).deleter.unwrap())(raw);
    }
}

#[test]
fn strides_offsets_and_flags_are_honoured() {
    let deleted = Arc::new(AtomicUsize::new(0));
    let take = |shape: &[i64], strides: &[i64], edit: fn(&mut DlManagedTensorVersioned)| {
        // SAFETY: `produce` makes a managed tensor whose 32 floats hold what these shapes reach.
        unsafe { Foreign::from_dlpack(produce(shape, strides, &deleted, edit)) }.unwrap()
    };
    {
        let f = take(&[2, 3], &[], |m| m.dl_tensor.byte_offset = 8);
        assert_eq!(f.view().unwrap().to_f32_vec().unwrap(), [2., 3., 4., 5., 6., 7.]);
        let f = take(&[2, 3], &[1, 8], |_| {});
        assert_eq!(f.view().unwrap().to_f32_vec().unwrap(), [0., 8., 16., 1., 9., 17.]);
        // The stride of an axis of one entry is not used.
        let f = take(&[1, 2], &[-7, 4], |_| {});
        assert_eq!(f.view().unwrap().to_f32_vec().unwrap(), [0., 4.]);
        // Read-only memory and memory reached twice are read, not written.
        let mut f = take(&[3], &[], |m| m.flags = FLAG_READ_ONLY | FLAG_COPIED);
        assert!(f.is_read_only() && f.view_mut().is_err() && f.view().is_ok());
        let mut f = take(&[3, 2], &[0, 1], |_| {});
        assert!(f.view_mut().is_err());
        assert_eq!(f.view().unwrap().to_f32_vec().unwrap(), [0., 1., 0., 1., 0., 1.]);
        // No element: neither the pointer nor the strides matter.
        let mut f = take(&[4, 0], &[i64::MIN, i64::MAX], |m| m.dl_tensor.data = ptr::without_provenance_mut(3));
        assert_eq!(f.view().unwrap().to_f32_vec().unwrap(), []);
        assert!(f.view_mut().unwrap().typed::<f32>("t", "x").is_ok());
    }
    assert_eq!(deleted.load(Ordering::Relaxed), 6);
    // A producer may have no deleter; this one's box is then freed by hand.
    let raw = produce(&[2], &[], &deleted, |m| m.deleter = None);
    // SAFETY: as above.
    let f = unsafe { Foreign::from_dlpack(raw) }.unwrap();
    assert_eq!(f.view().unwrap().to_f32_vec().unwrap(), [0., 1.]);
    drop(f);
    // SAFETY: nobody else frees it.
    unsafe { count_and_free(raw) };
    assert_eq!(deleted.load(Ordering::Relaxed), 7);
}

#[test]
fn hostile_descriptors_are_refused_and_freed_once() {
    type Edit = fn(&mut DlManagedTensorVersioned);
    let cases: &[(&[i64], &[i64], Edit, &str)] = &[
        (&[2], &[], |m| m.version.major = 2, "version"),
        (&[2], &[], |m| m.version.major = 0, "version"),
        (&[2], &[], |m| m.dl_tensor.device.device_type = 4, "device"),
        (&[2], &[], |m| m.dl_tensor.dtype.lanes = 4, "dtype"),
        (&[2], &[], |m| m.dl_tensor.dtype.lanes = 0, "dtype"),
        (&[2], &[], |m| m.dl_tensor.dtype.bits = 64, "dtype"),
        (&[2], &[], |m| m.dl_tensor.dtype.code = 255, "dtype"),
        (&[2], &[], |m| m.dl_tensor.dtype = DlDataType { code: 17, bits: 4, lanes: 1 }, "dtype"),
        (
            &[2],
            &[],
            |m| {
                m.dl_tensor.dtype = DType::E2M1x2.into();
                m.flags = FLAG_SUBBYTE_PADDED;
            },
            "flags",
        ),
        (&[2], &[], |m| m.dl_tensor.ndim = -1, "ndim"),
        (&[2], &[], |m| m.dl_tensor.ndim = i32::MAX, "ndim"),
        (&[1; 7], &[], |_| {}, "ndim"),
        (&[2], &[], |m| m.dl_tensor.shape = ptr::null_mut(), "shape"),
        (&[-2], &[], |_| {}, "shape"),
        (&[i64::MIN, 0], &[], |_| {}, "shape"),
        (&[i64::MAX, i64::MAX], &[], |_| {}, "shape"),
        (&[0, i64::MAX, i64::MAX], &[], |_| {}, "shape"),
        (&[2, 2], &[-2, 1], |_| {}, "strides"),
        (&[2, 2], &[i64::MAX, i64::MAX], |_| {}, "strides"),
        (&[1 << 40, 1 << 40], &[0, 0], |_| {}, "strides"),
        (&[1 << 61], &[], |_| {}, "shape"),
        (&[(1 << 61) - 1], &[], |m| m.dl_tensor.dtype = DType::I64.into(), "byte_offset"),
        (&[2], &[], |m| m.dl_tensor.byte_offset = u64::MAX, "byte_offset"),
        (&[2], &[], |m| m.dl_tensor.byte_offset = i64::MAX as u64, "byte_offset"),
        (&[2], &[], |m| m.dl_tensor.byte_offset = 2, "data"),
        (&[2], &[], |m| m.dl_tensor.data = ptr::null_mut(), "data"),
        (&[], &[], |m| m.dl_tensor.data = ptr::null_mut(), "data"),
    ];
    for (i, (shape, strides, edit, arg)) in cases.iter().enumerate() {
        let deleted = Arc::new(AtomicUsize::new(0));
        // SAFETY: the descriptor lies only in ways that are refused before memory is touched.
        let err = unsafe { Foreign::from_dlpack(produce(shape, strides, &deleted, edit)) }.unwrap_err();
        assert!(err.to_string().contains(&format!("`{arg}`")), "case {i}: {err}");
        assert_eq!(deleted.load(Ordering::Relaxed), 1, "case {i}");
    }
    // SAFETY: null is refused.
    assert!(unsafe { Foreign::from_dlpack(ptr::null_mut()) }.is_err());
    // SAFETY: null is refused.
    assert!(unsafe { Foreign::from_dlpack_unversioned(ptr::null_mut()) }.is_err());
}

#[test]
fn what_is_lent_is_checked_and_its_descriptor_may_go() {
    let mut data: Vec<f32> = (0..6).map(|i| i as f32).collect();
    let mut lend = |read_only, rows| {
        let (mut shape, mut strides) = (vec![rows, 2], vec![3, 1]);
        let tensor = DlTensor {
            data: data.as_mut_ptr().cast(),
            device: DlDevice { device_type: 1, device_id: 0 },
            ndim: 2,
            dtype: DType::F32.into(),
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 4,
        };
        // SAFETY: two rows of two lie inside `data`, which outlives the results; other numbers of rows are refused.
        unsafe { Foreign::lent(tensor, read_only) }
    };
    let mut lent = lend(false, 2).unwrap();
    assert_eq!(lent.place(), Place::Host);
    assert_eq!(lent.view().unwrap().to_f32_vec().unwrap(), [1.0, 2.0, 4.0, 5.0]);
    assert!(lent.view_mut().is_ok());
    assert!(lend(true, 2).unwrap().view_mut().is_err());
    assert!(lend(false, -1).is_err());
}

#[test]
fn a_foreign_tensor_moves_between_threads() {
    let deleted = Arc::new(AtomicUsize::new(0));
    // SAFETY: `produce` makes a managed tensor whose memory and deleter know no thread.
    let f = unsafe { Foreign::from_dlpack(produce(&[4], &[], &deleted, |_| {})) }.unwrap();
    let sum = std::thread::spawn(move || f.view().unwrap().to_f32_vec().unwrap().iter().sum::<f32>()).join().unwrap();
    assert_eq!((sum, deleted.load(Ordering::Relaxed)), (6.0, 1));
}

/// Bytes that start at an 8-byte boundary, plus `skip`.
struct Mapped {
    words: Vec<u64>,
    skip: usize,
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.skip..]
    }
}

#[test]
fn bytes_of_an_owner_are_a_read_only_tensor() {
    let mapped = |skip| -> BytesOwner { Box::new(Mapped { words: vec![0x0000_0002_0000_0001; 3], skip }) };
    let mut f = Foreign::from_owner(mapped(4), DType::I32, &[2, 2]).unwrap();
    assert_eq!(f.view().unwrap().typed::<i32>("t", "x").unwrap().data(), [2, 1, 2, 1]);
    assert!(f.is_read_only() && f.view_mut().is_err());
    assert!(Foreign::from_owner(mapped(0), DType::I32, &[7]).is_err());
    assert!(Foreign::from_owner(mapped(2), DType::I32, &[2]).is_err());
    assert!(Foreign::from_owner(mapped(0), DType::I32, &[usize::MAX, 3]).is_err());
    let none = Foreign::from_owner(Box::new(Vec::new()), DType::I64, &[0, 3]).unwrap();
    assert!(none.view().unwrap().typed::<i64>("t", "x").unwrap().data().is_empty());
}

#[test]
fn memory_of_a_device_is_named_and_not_touched() {
    let deleted = Arc::new(AtomicUsize::new(0));
    let managed = produce(&[3, 4], &[], &deleted, |m| {
        m.dl_tensor.device = DlDevice { device_type: 2, device_id: 1 };
        // An address that this process cannot read.
        m.dl_tensor.data = ptr::without_provenance_mut(0x7000_0000_1000);
        m.dl_tensor.byte_offset = 16;
    });
    // SAFETY: the descriptor is whole and given away; its memory is a device's, which nothing here touches.
    let mut f = unsafe { Foreign::from_dlpack(managed) }.unwrap();
    let row = f.view().unwrap().slice(0, 1..2).unwrap();
    assert_eq!(row.place(), Place::Cuda(1));
    assert_eq!(row.span(), Some(Span { address: 0x7000_0000_1020, len: 32, ordinal: 1 }));
    let refused = row.typed::<f32>("rms_norm", "x").unwrap_err();
    assert_eq!(refused.to_string(), "rms_norm: `x` is in memory of cuda:1, expected host memory");
    assert!(f.view_mut().unwrap().typed::<f32>("rms_norm", "out").is_err());
    drop(f);
    assert_eq!(deleted.load(Ordering::Relaxed), 1);
}

/// A device's memory that is a vector of ours.
struct Fake(Vec<u8>);

impl DeviceMemory for Fake {
    fn span(&self) -> Span {
        Span { address: 0x4000_0000, len: self.0.len(), ordinal: 2 }
    }
    fn duplicate(&self) -> Result<Box<dyn DeviceMemory>> {
        Ok(Box::new(Self(self.0.clone())))
    }
    fn read(&self, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(&self.0[..out.len()]);
        Ok(())
    }
}

#[test]
fn a_tensor_on_a_device_is_read_back_cloned_and_exported() {
    let bytes: Vec<u8> = [1f32, 2.0, 3.0, 4.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let layout = Layout::contiguous("t", "x", &[2, 2]).unwrap();
    assert!(Tensor::on_device(Box::new(Fake(vec![0; 15])), DType::F32, layout).is_err());
    let t = Tensor::on_device(Box::new(Fake(bytes)), DType::F32, layout).unwrap();
    assert_eq!(t.place(), Place::Cuda(2));
    assert!(t.as_slice::<f32>().is_err() && t.view().to_f32_vec().is_err());
    assert_eq!(t.clone().to_host().unwrap().as_slice::<f32>().unwrap(), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(t.to_host().unwrap().place(), Place::Host);
    let raw = t.into_dlpack().into_raw();
    // SAFETY: `raw` was just made, and is read before it is given away.
    let dl = unsafe { (*raw).dl_tensor };
    assert_eq!((dl.device.device_type, dl.device.device_id, dl.data.addr()), (2, 2, 0x4000_0000));
    // SAFETY: as above; the memory is a device's, which nothing here touches.
    let f = unsafe { Foreign::from_dlpack(raw) }.unwrap();
    assert_eq!(f.view().unwrap().place(), Place::Cuda(2));
}

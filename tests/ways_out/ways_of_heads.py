"""What heads and targets refuse, and what follows the advice."""

import joblib
import sklearn
from packaging.version import Version
from sklearn import (
    base,
    cluster,
    compose,
    covariance,
    discriminant_analysis,
    ensemble,
    feature_selection,
    gaussian_process,
    impute,
    kernel_ridge,
    naive_bayes,
    neighbors,
    preprocessing,
    semi_supervised,
    tree,
)
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import NMF
from sklearn.gaussian_process import kernels
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import GammaRegressor, LogisticRegression, Ridge
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import FixedThresholdClassifier, GridSearchCV
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer, Normalizer
from sklearn.svm import SVR, OneClassSVM
from ways_builders import *

from pytorch_grad_cam_pcasvm import DensityTarget, HotellingTarget, LogRatioTarget, ResidualTarget, stage_for
from pytorch_grad_cam_pcasvm.head.elementwise import Elementwise
from pytorch_grad_cam_pcasvm.head.stage import Stage

NUMBERS = 1 + FEATURES[:, 0] ** 2


class Labelling:
    """A classifier that no library knows, on two numbers."""

    n_features_in_ = 2

    def __init__(self, classes: Any) -> None:
        if classes is not None:
            self.classes_ = classes

    def predict(self, X: Any) -> Any:  # noqa: N803 - scikit-learn's name
        return np.digitize(X[:, 0] + X[:, 1], [-0.5, 0.5])


def program_of(estimator: Any) -> Any:
    net = PCASVMNet(copy.deepcopy(BACKBONE).float(), estimator.fit(FEATURES, THREE)).eval()
    return export.program(ContributionCAM(net, ["0"]), PICTURES[:2].float())


def maps_of_labelling(target: Any = None) -> SignedMaps:
    return maps_of([PCA(2).fit(FEATURES), Labelling(np.arange(3))], targets=target, method=ContributionCAM)


class Unnamed(Labelling):
    """A classifier that does not name its classes, and whose probabilities decide nothing."""

    def __init__(self) -> None:
        super().__init__(None)

    def predict_proba(self, X: Any) -> Any:  # noqa: N803 - scikit-learn's name
        return np.full((len(X), 3), 1 / 3)


class Probabilities:
    """What has a predict_proba alone, with so many columns."""

    n_features_in_ = 2

    def __init__(self, count: int) -> None:
        self.count = count

    def predict_proba(self, X: Any) -> Any:  # noqa: N803 - scikit-learn's name
        return np.full((len(X), self.count), 1 / self.count)


class Wavering(Labelling):
    """A classifier that predicts at random."""

    def predict(self, X: Any) -> Any:  # noqa: N803 - scikit-learn's name
        return np.random.default_rng().integers(0, 3, len(X))


def several_labels(kind: Any) -> list[Any]:
    """Return a PCA, and a classifier of two labels at a time."""
    pca = PCA(2).fit(FEATURES)
    p = pca.transform(FEATURES)
    return [pca, kind(tree.DecisionTreeClassifier(max_depth=2)).fit(p, (p > 0).astype(int))]


def loaded_again(estimator: Any, **options: Any) -> Head:
    """Return the head of a file."""
    path = folder() / "estimators.safetensors"
    Head.of([PCA(2).fit(FEATURES), estimator]).save(path)
    return Head.load(path, **options)


BUILD, ENSEMBLES = "head/refusals.py: ", "head/estimators/ensembles.py: "
PREDICTORS, TRANSFORMERS = "head/estimators/predictors.py: ", "head/estimators/transformers.py: "
UNSUPPORTED = "head/refusals.py: reason, usual, *own"


class Patched(SVC):
    """A function that is not scikit-learn's, from a library that should compute the same."""

    __module__ = "sklearnex.svm"

    def decision_function(self, X: Any) -> Any:  # noqa: N803 - scikit-learn's name
        return super().decision_function(X) * 1.01


def with_own_predict(kind: type) -> type:
    """Return a subclass with a function of its own."""
    return type("Own" + kind.__name__, (kind,), {"predict": lambda self, rows: kind.predict(self, rows)})


OwnSVC, OwnPipeline, OwnGridSearchCV = map(with_own_predict, (SVC, Pipeline, GridSearchCV))


class DoubledRows(base.BaseEstimator):
    """A transformer that nothing is registered for."""

    def fit(self, X: Any, y: Any = None) -> "DoubledRows":  # noqa: N803 - scikit-learn's name
        self.n_features_in_ = X.shape[1]
        return self

    def transform(self, X: Any) -> Any:  # noqa: N803 - scikit-learn's name
        return 2 * X


class Square(Stage):
    """A stage without a secant."""

    def evaluate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x**2, x

    def pullback(self, saved: Tensor, grad: Tensor) -> tuple[Tensor, None]:
        return 2 * grad * saved.unsqueeze(1), None


class SquareWithSecant(Square):
    """The same with a secant."""

    def secant(self, saved: Tensor, saved0: Tensor, grad: Tensor) -> tuple[Tensor, None]:
        return grad * (saved + saved0).unsqueeze(1), None


class Halved(Stage):
    """An affine stage that says so."""

    linear = True

    def evaluate(self, x: Tensor) -> tuple[Tensor, None]:
        return x / 2, None

    def pullback(self, saved: None, grad: Tensor) -> tuple[Tensor, None]:
        return grad / 2, None


def registered(estimator: Any, stage: Callable[[], Stage], y: Any = THREE) -> SignedMaps:
    """Return the maps of an estimator whose class is registered, before an SVC."""
    registered_class = type("Registered", (type(estimator),), {})
    fitted = registered_class(**estimator.get_params()).fit(FEATURES, y)
    stage_for.register(registered_class)(lambda estimator: stage())
    return maps_of([fitted, SVC().fit(FEATURES, y)], y)


def registered_machine(estimator: Any, y: Any = THREE) -> SignedMaps:
    """Return the maps of a classifier whose class is registered, as an SVM."""
    registered_class = type("Registered", (type(estimator),), {})
    stage_for.register(registered_class)(lambda estimator: stage_for(SVC().fit(FEATURES, y)))
    return maps_of(registered_class(**estimator.get_params(deep=False)), y)


def neighbours_of(pool: str) -> PCASVMNet:
    rows, _ = extract_features(BACKBONE, [PICTURES], "0", pool=pool, progress=False)
    return PCASVMNet(BACKBONE, neighbors.NearestNeighbors().fit(rows), "0", pool=pool).eval()


def behind(stage: Stage) -> Head:
    """Return a head that begins with a stage."""
    return Head([stage, *head_of(LinearSVC()).stages])


def outliers(targets: Any) -> Callable[[], SignedMaps]:
    return partial(maps_of, make_pipeline(StandardScaler(), PCA(3)), targets=targets)


def stacked(member: Any, **options: Any) -> Any:
    return ensemble.StackingClassifier([("member", member)], cv=3, **options)


def bagged(member: Any, **options: Any) -> Any:
    return ensemble.BaggingClassifier(member, 4, random_state=0, **options)


def voted(member: Any, **options: Any) -> Any:
    return ensemble.VotingClassifier([("member", member)], **({"voting": "soft"} | options))


def calibrated_on_some() -> Any:
    fitted = CalibratedClassifierCV(LinearSVC(), cv=3).fit(FEATURES, THREE)
    fitted.calibrated_classifiers_[0].estimator = LinearSVC().fit(FEATURES[THREE < 2], THREE[THREE < 2])
    return closed_form(fitted)


def calibrated_by_temperature() -> Head:
    if Version(sklearn.__version__) < Version("1.8"):
        pytest.skip("this scikit-learn has no temperature scaling")
    return head_of(CalibratedClassifierCV(bagged(LogisticRegression()), method="temperature", cv=2))


def bagged_on_some() -> Any:
    fitted = bagged(LogisticRegression()).fit(FEATURES, THREE)
    fitted.estimators_[0] = LogisticRegression().fit(FEATURES[THREE < 2], THREE[THREE < 2])
    return closed_form(fitted)


def final_that_decides_nothing() -> Head:
    registered_class = type("Registered", (LogisticRegression,), {})
    stage_for.register(registered_class)(lambda estimator: Elementwise("tanh"))
    return head_of(stacked(LinearSVC(), final_estimator=registered_class()))


def lacking(attribute: str, version: str | None) -> Head:
    """Return the head of an SVM as an earlier version would have left it."""
    machine = SVC().fit(FEATURES, THREE)
    delattr(machine, attribute)
    if version:
        machine._sklearn_version = version
    return Head.of(machine)


def hooked_head(*, remove: bool) -> SignedMaps:
    """Return the maps of a head with a hook that changes something, or after removing it."""
    net = PCASVMNet(BACKBONE, make_pipeline(PCA(2), SVC()).fit(FEATURES, THREE)).eval()
    handle = net.head.stages[0].register_forward_hook(lambda module, args, output: 2 * output)
    if remove:
        handle.remove()
    return ClosedFormGradCAM(net, ["0"]).explain(PICTURES[:3])


def doubled_backbone() -> SignedMaps:
    backbone = nn.Sequential(*BACKBONE, Step(lambda x: 2 * x)).eval()
    net = PCASVMNet(backbone, make_pipeline(PCA(2), SVC()).fit(FEATURES, THREE)).eval()
    return ClosedFormGradCAM(net, ["0"]).explain(PICTURES[:3])


PIECEWISE = "its output is piecewise constant, its gradient 0"
REFUSED_MEMBER = "is not supported: fit it with "


def far_from_its_boundary(baseline: str) -> SignedMaps:
    machine = SVC().fit(FEATURES, TWO)
    machine.intercept_, machine._intercept_ = machine.intercept_ + 1e3, machine._intercept_ - 1e3
    return maps_of(
        [PCA(6).fit(FEATURES), machine],
        TWO,
        SVMTarget(1),
        partial(ContributionCAM, baseline=baseline, mean=MEAN_ACTIVATIONS),
    )


class ForOneSide(SVC):
    """An SVM whose support vectors all speak for one class."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:  # noqa: N803 - scikit-learn's name
        super().fit(X, y)
        self.dual_coef_, self._intercept_ = abs(self.dual_coef_), abs(self.intercept_)
        self.intercept_ = self._intercept_
        return self


def log_ratio(estimator: Any, target: Any, y: Any = TWO) -> SignedMaps:
    return maps_of(estimator, y, target)


def refitted(*, another: bool) -> Any:
    """Use a network whose head has been fitted again since, or another one."""
    pipeline = make_pipeline(PCA(2), SVC()).fit(FEATURES, THREE)
    net = PCASVMNet(BACKBONE, pipeline).eval()
    pipeline.fit(FEATURES[:60], THREE[:60])
    return as_error(lambda: (PCASVMNet(BACKBONE, pipeline).eval() if another else net)(PICTURES[:3]))


def pickled() -> Path:
    path = folder() / f"head{next(NUMBERING)}.joblib"
    joblib.dump(make_pipeline(PCA(2), SVC()).fit(FEATURES, THREE), path)
    return path


def from_pickle(*, saved: bool) -> Any:
    fitted = joblib.load(pickled())
    if saved:
        Head.of(fitted).save(folder() / "head.safetensors")
        fitted = Head.load(folder() / "head.safetensors")
    return maps_of([fitted] if not saved else fitted)


MEAN_ACTIVATIONS = BACKBONE[0](PICTURES).mean(0).detach()


# fmt: off
ROWS = [
    # What _INSTEAD and _usual say.
    head(UNSUPPORTED, PIECEWISE + ": fit SVC", ensemble.RandomForestClassifier(3), {"fit SVC": SVC()}),
    head(UNSUPPORTED, PIECEWISE + ": fit SVR", ensemble.RandomForestRegressor(3), {"fit SVR": SVR()}, NUMBERS),
    head(UNSUPPORTED, "RadiusNeighborsClassifier has no closed-form Jacobian",
        neighbors.RadiusNeighborsClassifier(3, outlier_label="most_frequent"), {
        "fit KNeighborsClassifier": neighbors.KNeighborsClassifier()}),
    *(Row(UNSUPPORTED, partial(head_of, estimator),
            "fit OneClassSVM or EllipticEnvelope, or fit PCA and explain ResidualTarget() or HotellingTarget()",
            {"fit OneClassSVM": partial(maps_of, OneClassSVM(), targets=SVMTarget()),
                "EllipticEnvelope": partial(maps_of, covariance.EllipticEnvelope(), targets=SVMTarget()),
                "ResidualTarget()": outliers(ResidualTarget()), "HotellingTarget()": outliers(HotellingTarget())})
        for estimator in (ensemble.IsolationForest(n_estimators=3),)),
    head(UNSUPPORTED, "since it searches for training images, and decides nothing: fit KNeighborsClassifier",
        neighbors.KNeighborsTransformer(), {"fit KNeighborsClassifier": neighbors.KNeighborsClassifier()}),
    head(UNSUPPORTED, "Birch has no closed-form Jacobian here", cluster.Birch(n_clusters=3), {
        "fit GaussianMixture, whose components are clusters": GaussianMixture(3, random_state=0),
        "to reduce features PCA": make_pipeline(PCA(2), SVC()),
        "add yours with stage_for.register(Birch)": partial(registered, cluster.Birch(n_clusters=6),
            partial(Elementwise, "tanh"))}),
    head(UNSUPPORTED, "since it groups its training images, and no others", cluster.DBSCAN(), {
        "fit GaussianMixture": GaussianMixture(3, random_state=0)}),
    head(UNSUPPORTED, "stops at a tolerance: fit PCA", make_pipeline(preprocessing.MinMaxScaler(), NMF(2)), {
        "fit PCA": make_pipeline(preprocessing.MinMaxScaler(), PCA(2))}),
    head(UNSUPPORTED, PIECEWISE, make_pipeline(preprocessing.Binarizer(), SVC()), {
        "fit StandardScaler": make_pipeline(StandardScaler(), SVC())}),
    head(UNSUPPORTED, "estimates a covariance, and decides nothing", covariance.LedoitWolf(), {
        "fit EllipticEnvelope": covariance.EllipticEnvelope()}, targets=SVMTarget()),
    head("head/estimators/likeness.py: as a step before others has no closed form",
        "KMeans as a step before others has no closed form: fit PCA", make_pipeline(cluster.KMeans(3), SVC()), {
        "fit PCA": make_pipeline(PCA(3), SVC())}),
    head("head/estimators/likeness.py: was fitted to find outliers in its training set",
        "and knows nothing of other images: fit it with novelty=True", neighbors.LocalOutlierFactor(), {
        "fit it with novelty=True": neighbors.LocalOutlierFactor(novelty=True)}, targets=SVMTarget()),
    head("head/estimators/likeness.py: has the metric",
        "LocalOutlierFactor has the metric 'cosine': fit it with 'euclidean', or also put a Normalizer before it",
        neighbors.LocalOutlierFactor(novelty=True, metric="cosine"), {
        "fit it with 'euclidean'": neighbors.LocalOutlierFactor(novelty=True),
        "also put a Normalizer before it, for angles": make_pipeline(Normalizer(),
            neighbors.LocalOutlierFactor(novelty=True))}, targets=SVMTarget()),
    Row("targets/scores.py: needs the log-density of a mixture", lambda: maps_of(PCA(2), targets=DensityTarget()),
        "fit GaussianMixture, or explain the value of another density or distance with SVMTarget()", {
        "fit GaussianMixture": partial(maps_of, GaussianMixture(2, random_state=0), targets=DensityTarget()),
        "SVMTarget()": partial(maps_of, neighbors.KernelDensity(), targets=SVMTarget())}),
    head("head/estimators/likeness.py: neighbours among", "NearestNeighbors has 121 neighbours among 120 training rows",
        neighbors.NearestNeighbors(n_neighbors=121), {
        "fit it with a smaller n_neighbors": neighbors.NearestNeighbors(n_neighbors=120)}),
    head("head/estimators/likeness.py: KernelDensity has the",
        "KernelDensity has the kernel 'tophat': fit it with 'gaussian'", neighbors.KernelDensity(kernel="tophat"), {
        "fit it with 'gaussian'": neighbors.KernelDensity()}, targets=SVMTarget()),
    Row("head/anomalies.py: is of distances to training patches",
        lambda: neighbours_of("mean").anomaly_score(PICTURES[:2], neighbours=3),
        "neighbours= is of distances to training patches", {
        "fit NearestNeighbors on features of positions, pool='dense'": lambda: neighbours_of("dense").anomaly_score(
            PICTURES[:2], neighbours=3)}),
    Row("targets/places.py: at= names a place", partial(at_a_place, pool="mean"),
        "at= names a place, but there is one row of features for each image", {
        "fit the head on features of positions, pool='dense'": partial(at_a_place, pool="dense")}),
    Row(UNSUPPORTED, lambda: closed_form(naive_bayes.CategoricalNB().fit(abs(FEATURES).astype(int), THREE)),
        "takes categories, not numbers", {"fit GaussianNB": partial(maps_of, naive_bayes.GaussianNB())}),
    head(UNSUPPORTED, "features have none: leave it out", make_pipeline(impute.SimpleImputer(), SVC()), {
        "leave it out": SVC()}),
    head(UNSUPPORTED, "PolynomialFeatures has no closed-form Jacobian here",
        make_pipeline(preprocessing.PolynomialFeatures(), LinearSVC()), {
        "fit Nystroem": make_pipeline(Nystroem(kernel="poly", n_components=20, random_state=0), LinearSVC()),
        "add yours with stage_for.register(PolynomialFeatures)": partial(registered, preprocessing.PolynomialFeatures(),
            partial(Elementwise, "tanh"))}),
    head(UNSUPPORTED, "QuantileTransformer has no",
        make_pipeline(preprocessing.QuantileTransformer(n_quantiles=9), SVC()), {
        "fit PowerTransformer": make_pipeline(preprocessing.PowerTransformer(), SVC()),
        "add yours with stage_for.register(QuantileTransformer)": partial(registered,
            preprocessing.QuantileTransformer(n_quantiles=9), partial(Elementwise, "tanh"))}),
    # What is refused for other reasons.
    head("head/elsewhere.py: computes other values than scikit-learn's", "Patched of sklearnex computes other values",
        Patched(), {"fit scikit-learn's own": SVC()}),
    head(BUILD + "of its own, which would not be explained", "OwnSVC is a SVC with a predict of its own", OwnSVC(), {
        "add it with stage_for.register(OwnSVC)": partial(registered_machine, OwnSVC(), TWO)}, TWO),
    head(BUILD + "of its own, which would not be explained", "OwnPipeline is a Pipeline with a predict",
        OwnPipeline([("scaler", StandardScaler()), ("machine", SVC())]), {
        "add it with stage_for.register(OwnPipeline)": partial(registered_machine,
            OwnPipeline([("scaler", StandardScaler()), ("machine", SVC())])),
        "pass its fitted steps as a list": lambda: maps_of([step for _, step
                in OwnPipeline([("s", StandardScaler()), ("m", SVC())]).fit(FEATURES, THREE).steps])}),
    head(BUILD + "of its own, which would not be explained", "OwnGridSearchCV is a GridSearchCV with a predict",
        OwnGridSearchCV(SVC(), {"C": [1.0]}), {
        "add it with stage_for.register(OwnGridSearchCV)": partial(registered_machine,
            OwnGridSearchCV(SVC(), {"C": [1.0]})),
        "pass its best_estimator_": lambda: maps_of([OwnGridSearchCV(SVC(), {"C": [1.0]}).fit(FEATURES,
                    THREE).best_estimator_])}),
    *(Row(BUILD + "which it has in scikit-learn", partial(lacking, attribute, version), message,
            {"fit it again": partial(maps_of, SVC()), "install that version": "one version is installed here"})
        for attribute, version, message
        in (("_gamma", "1.2.2", f"in scikit-learn {sklearn.__version__}; it was fitted with scikit-learn 1.2.2: fit"),
            ("support_vectors_", None, "which the InconsistentVersionWarning names when it is unpickled"))),
    head("head/estimators/likeness.py: {type(estimator).__name__} has the kernel",
        "KernelRidge has the kernel 'laplacian'", kernel_ridge.KernelRidge(kernel="laplacian"),
        {f"'{name}'": kernel_ridge.KernelRidge(kernel=name) for name in ("linear", "rbf", "poly", "sigmoid")}, NUMBERS,
        SVMTarget()),
    head("head/estimators/likeness.py: is constant", "is constant, so there is nothing to explain",
        gaussian_process.GaussianProcessRegressor(kernels.ConstantKernel(), optimizer=None), {
        "such as RBF()": gaussian_process.GaussianProcessRegressor(kernels.RBF())}, NUMBERS, SVMTarget()),
    head("head/estimators/likeness.py: a Gaussian process has the kernel", "a Gaussian process has the kernel Matern",
        gaussian_process.GaussianProcessRegressor(kernels.Matern(), optimizer=None), {
        "sums and multiples of RBF, DotProduct and WhiteKernel": gaussian_process.GaussianProcessRegressor(
            2.0 * kernels.RBF() + kernels.DotProduct() + kernels.WhiteKernel(), optimizer=None)}, NUMBERS, SVMTarget()),
    Row(ENSEMBLES + "a fold of CalibratedClassifierCV saw only", calibrated_on_some,
        "a fold of CalibratedClassifierCV saw only some classes", {
        "fit it with fewer folds": partial(maps_of, CalibratedClassifierCV(LinearSVC(), cv=2))}),
    Row(ENSEMBLES + "a member of {type(estimator).__name__} saw only", bagged_on_some,
        "a member of BaggingClassifier saw only some classes", {
        "more images of the rare classes": partial(maps_of, bagged(LogisticRegression())),
        "with a larger max_samples": partial(maps_of, bagged(LogisticRegression(), max_samples=1.0))}),
    head(ENSEMBLES + "a classifier that has one decision value",
        "OneVsRestClassifier of KNeighborsClassifier " + REFUSED_MEMBER,
        OneVsRestClassifier(neighbors.KNeighborsClassifier()), {"e.g. SVC": OneVsRestClassifier(SVC())}),
    head(ENSEMBLES + "voting='hard'", "counts votes, a step", voted(LogisticRegression(), voting="hard"), {
        "use voting='soft'": voted(LogisticRegression())}),
    head(ENSEMBLES + "or it counts votes", "BaggingClassifier of SVC " + REFUSED_MEMBER, bagged(SVC()), {
        "a classifier that has probabilities": bagged(LogisticRegression())}),
    head(ENSEMBLES + "members whose probabilities are known",
        "VotingClassifier of KNeighborsClassifier " + REFUSED_MEMBER, voted(neighbors.KNeighborsClassifier()), {
        "e.g. CalibratedClassifierCV(SVC())": voted(CalibratedClassifierCV(SVC()))}),
    head(ENSEMBLES + "regressors that predict their decision value",
        "VotingRegressor of GammaRegressor " + REFUSED_MEMBER, ensemble.VotingRegressor([("member", GammaRegressor())]),
        {"e.g. SVR": ensemble.VotingRegressor([("member", SVR())])}, NUMBERS),
    Row(ENSEMBLES + "MultiOutputClassifier has an output of the classes",
        partial(head_of, MultiOutputClassifier(SVC()), np.stack([THREE, TWO], 1)),
        "MultiOutputClassifier has an output of the classes [0, 1, 2]", {
        "fit a head for each output": partial(maps_of, SVC(), THREE)}),
    # Stacks.
    head(ENSEMBLES + "_stackable(", "StackingClassifier of SVC " + REFUSED_MEMBER, stacked(SVC()), {
        "LinearSVC()": stacked(LinearSVC()), "OneVsRestClassifier(SVC())": stacked(OneVsRestClassifier(SVC())),
        "SVC(decision_function_shape='ovo')": stacked(SVC(decision_function_shape="ovo"))}),
    head(ENSEMBLES + "_stackable(", "StackingClassifier of OneVsOneClassifier " + REFUSED_MEMBER,
        stacked(OneVsOneClassifier(SVC())), {"OneVsRestClassifier(SVC())": stacked(OneVsRestClassifier(SVC()))}),
    head(ENSEMBLES + "_stackable(", "StackingClassifier of LogisticRegression " + REFUSED_MEMBER,
        stacked(LogisticRegression()), {
        "stack_method='decision_function' (now 'predict_proba')": stacked(LogisticRegression(),
            stack_method="decision_function")}),
    head(ENSEMBLES + "_stackable(", "StackingClassifier of KNeighborsClassifier " + REFUSED_MEMBER,
        stacked(neighbors.KNeighborsClassifier()), {
        "as LinearSVC(), and stack_method='decision_function'": stacked(LinearSVC(),
            stack_method="decision_function")}),
    head(ENSEMBLES + "_stackable(", "StackingRegressor of GammaRegressor " + REFUSED_MEMBER,
        ensemble.StackingRegressor([("member", GammaRegressor())]), {
        "e.g. SVR": ensemble.StackingRegressor([("member", SVR())])}, NUMBERS),
    Row(ENSEMBLES + "a final estimator that decides", final_that_decides_nothing,
        "fit it with a final estimator that decides", {
        "e.g. LogisticRegression": partial(maps_of, stacked(LinearSVC(), final_estimator=LogisticRegression()))}),
    Row(ENSEMBLES + "temperature scaling of these probabilities", calibrated_by_temperature,
        "temperature scaling of these probabilities is not supported", {
        "fit it with method='sigmoid'": partial(maps_of,
            CalibratedClassifierCV(bagged(LogisticRegression()), method="sigmoid", cv=2))}),
    head(ENSEMBLES + "a threshold within (0, 1)", "FixedThresholdClassifier of SVC " + REFUSED_MEMBER,
        FixedThresholdClassifier(SVC(probability=True), threshold=0.3, response_method="predict_proba"), {
        "within (0, 1) of a sigmoid probability": FixedThresholdClassifier(LogisticRegression(), threshold=0.3),
        "one of decision values": FixedThresholdClassifier(SVC(), threshold=0.3, response_method="decision_function")},
            TWO),
    head(ENSEMBLES + "the inverse function exp or expm1",
        "TransformedTargetRegressor of FunctionTransformer " + REFUSED_MEMBER,
        compose.TransformedTargetRegressor(Ridge(), func=np.sqrt, inverse_func=np.square), {
        "exp or expm1": compose.TransformedTargetRegressor(Ridge(), func=np.log1p, inverse_func=np.expm1),
        "a scaler": compose.TransformedTargetRegressor(Ridge(), transformer=StandardScaler())}, NUMBERS),
    head(ENSEMBLES + "a scaler of the target", "TransformedTargetRegressor of PowerTransformer " + REFUSED_MEMBER,
        compose.TransformedTargetRegressor(Ridge(), transformer=preprocessing.PowerTransformer()), {
        "StandardScaler": compose.TransformedTargetRegressor(Ridge(), transformer=StandardScaler()),
        "the function exp or expm1": compose.TransformedTargetRegressor(Ridge(), func=np.log, inverse_func=np.exp)},
            NUMBERS),
    head(PREDICTORS + "NearestCentroid has the metric", "NearestCentroid has the metric 'manhattan'",
        neighbors.NearestCentroid(metric="manhattan"), {"fit it with 'euclidean'": neighbors.NearestCentroid()}),
    head(PREDICTORS + "BernoulliNB cuts its features", "BernoulliNB cuts its features", naive_bayes.BernoulliNB(), {
        "fit GaussianNB": naive_bayes.GaussianNB(),
        "fit it with binarize=None": lambda: maps_of(
            [naive_bayes.BernoulliNB(binarize=None).fit((FEATURES > 0).astype(int), THREE)])}),
    *(head(PREDICTORS + place, message, neighbors.KNeighborsClassifier(**options), ways) for place, message, options,
        ways in (("{name} has the metric", "has the metric 'manhattan'", {"metric": "manhattan"},
                {"'euclidean'": neighbors.KNeighborsClassifier(metric="euclidean"),
                    "'cosine'": neighbors.KNeighborsClassifier(metric="cosine")}),
            ("{name} weighs votes", "weighs votes by 'distance'", {"weights": "distance"},
                {"weights='uniform'": neighbors.KNeighborsClassifier(weights="uniform")}),
            ("which often tie", "lets 4 neighbours vote", {"n_neighbors": 4},
                {"an odd n_neighbors": neighbors.KNeighborsClassifier(3)}),
            ("too few for most of", "too few for most of 99 votes", {"n_neighbors": 99},
                {"a smaller n_neighbors": neighbors.KNeighborsClassifier(3)}))),
    Row(PREDICTORS + "{name} was fitted on several outputs",
        partial(head_of, neighbors.KNeighborsClassifier(), COLUMNS), "was fitted on several outputs", {
        "fit a head for each output": partial(maps_of, neighbors.KNeighborsClassifier(), TWO)}),
    head(PREDICTORS + "GaussianProcessClassifier decides between",
        "GaussianProcessClassifier decides between 3 classes by integrals",
        gaussian_process.GaussianProcessClassifier(), {
        "fit SVC": SVC(),
        "MultiOutputClassifier(GaussianProcessClassifier()) on one column of 0 and 1 for each class": partial(maps_of,
            MultiOutputClassifier(gaussian_process.GaussianProcessClassifier()), COLUMNS)}),
    head(PREDICTORS + "{type(estimator).__name__} has the kernel", "LabelPropagation has the kernel 'knn'",
        semi_supervised.LabelPropagation(kernel="knn"), {
        "fit it with 'rbf'": semi_supervised.LabelPropagation(kernel="rbf", gamma=0.1)}),
    head(TRANSFORMERS + "at the end predicts", "RFE at the end predicts with an estimator of its own",
        feature_selection.RFE(LinearSVC(), n_features_to_select=3), {
        "[..., rfe, rfe.estimator_]": lambda: maps_of((lambda rfe: [rfe,
                    rfe.estimator_])(feature_selection.RFE(LinearSVC(), n_features_to_select=3).fit(FEATURES,
                    THREE)))}),
    head(TRANSFORMERS + "FunctionTransformer(", "has no closed-form Jacobian: only numpy's",
        make_pipeline(FunctionTransformer(np.cbrt), SVC()), {
        "move the function into the backbone": doubled_backbone,
        "register a transformer of your own": partial(registered, DoubledRows(), partial(Elementwise, "tanh"))}),
    head(TRANSFORMERS + "FeatureAgglomeration(", "FeatureAgglomeration(pooling_func=...) is not supported",
        make_pipeline(cluster.FeatureAgglomeration(3, pooling_func=np.max), SVC()), {
        "fit it with numpy.mean": make_pipeline(cluster.FeatureAgglomeration(3, pooling_func=np.mean), SVC())}),
    Row(TRANSFORMERS + "solver='lsqr'",
        lambda: Head.of([discriminant_analysis.LinearDiscriminantAnalysis(solver="lsqr").fit(FEATURES, THREE), SVC()]),
        "solver='lsqr') transforms nothing",
        {f"'{solver}'": partial(maps_of,
                make_pipeline(discriminant_analysis.LinearDiscriminantAnalysis(solver=solver), SVC())) for solver
            in ("svd", "eigen")}),
    head(TRANSFORMERS + "Nystroem(", "Nystroem(kernel_params=...) is not supported",
        make_pipeline(Nystroem(kernel="rbf", kernel_params={"gamma": 0.1}, n_components=9), SVC()), {
        "pass gamma, degree and coef0 directly": make_pipeline(Nystroem(gamma=0.1, n_components=9), SVC())}),
    Row("head/stage.py: a hook on", partial(hooked_head, remove=False),
        "a hook on Projection, a part of the head, changes", {
        "remove it": partial(hooked_head, remove=True), "move what it does into the backbone": doubled_backbone,
        "register a stage that does it": partial(registered, DoubledRows(), partial(Elementwise, "tanh"))}),
    Row("head/stage.py: has no secant",
        lambda: maps_of(behind(Square()), method=partial(ContributionCAM, baseline="zero")), "Square has no secant", {
        "define secant(saved, saved0, grad)": lambda: maps_of(behind(SquareWithSecant()),
            method=partial(ContributionCAM, baseline="zero")),
        "set linear = True": lambda: maps_of(behind(Halved()), method=partial(ContributionCAM, baseline="zero")),
        "use a method that needs only the gradient": lambda: maps_of(behind(Square()))}),
    Row("head/stack.py: the head was fitted on",
        lambda: PCASVMNet(Crops(), SVC().fit(FEATURES[:, :5], THREE)).eval()(CROPS[:3]),
        "the head was fitted on 5 features, but the backbone gives 20", {
        "name the layer that the features came from": partial(crops, "rows"),
        "if it gives 4 crops or patches of each image, (N, 4, 5), pass pool=lambda t: t.mean(1)": partial(crops,
            "pooled")}),
    Row("starts/boundary_head.py: no decision boundary is within reach", partial(far_from_its_boundary, "neutral"),
        "start at the mean instead, baseline='mean'", {"baseline='mean'": partial(far_from_its_boundary, "mean")}),
    Row("targets/target.py: is not linear in the network's scores",
        partial(stepped, nn.Tanh(), ContributionCAM, targets=[OwnTarget()], baseline="zero"),
        "is not linear in the network's scores", {
        "use SVMTarget": partial(stepped, nn.Tanh(), ContributionCAM, targets=[SVMTarget()], baseline="zero"),
        "PCATarget": partial(stepped, nn.Tanh(), ContributionCAM, targets=[PCATarget(0)], baseline="zero"),
        "or a gradient method such as ClosedFormGradCAM": partial(stepped, nn.Tanh(), targets=[OwnTarget()])}),
    Row("head/stack.py: the head has no SVM", lambda: net_of(HALF).head.voting,
        "the head has no SVM: use PCATarget, or add a fitted SVC", {
        "use PCATarget": partial(maps_of, HALF, targets=PCATarget(0)),
        "add a fitted SVC after the PCA": lambda: net_of(make_pipeline(PCA(2), SVC())).head.voting}),
    Row("head/head.py: was fitted again, or replaced", partial(refitted, another=False),
        "was fitted again, or replaced, after this network was made", {
        "make another one, PCASVMNet(backbone, head, ...)": partial(refitted, another=True)}),
    Row("head/head.py: the head has no classes", partial(maps_of, SVR(), NUMBERS, SVMTarget("cat")),
        "the head has no classes, so 'cat' is not one", {
        "use SVMTarget()": partial(maps_of, SVR(), NUMBERS, SVMTarget()),
        "SVMTarget(sign='-')": partial(maps_of, SVR(), NUMBERS, SVMTarget(sign="-"))}),
    *(Row("head/log_ratio.py: " + part, partial(log_ratio, estimator, LogRatioTarget(*category), y), part,
            {"use SVMTarget": partial(log_ratio, estimator, SVMTarget(*category), y)}) for part, estimator, category, y
        in (("LogRatioTarget is for classifiers", SVR(), (), NUMBERS),
            ("LogRatioTarget needs a kernel that is positive everywhere", SVC(kernel="linear"), (1,), TWO),
            ("LogRatioTarget needs terms for and against", ForOneSide(), (1,), TWO),
            ("LogRatioTarget needs an SVM with an RBF kernel", LinearSVC(), (1,), TWO))),
    Row("head/fit_checks.py: was fitted on one class only",
        partial(head_of, naive_bayes.GaussianNB(), np.zeros(len(THREE))),
        "was fitted on one class only, 0.0, and has nothing to decide", {
        "fit it on two classes or more": partial(maps_of, naive_bayes.GaussianNB(), TWO),
        "make_pipeline(StandardScaler(), PCA(3))": partial(maps_of, make_pipeline(StandardScaler(), PCA(3))),
        "fit a OneClassSVM": partial(maps_of, OneClassSVM())}),
    Row("head/fit_checks.py: all training features are alike",
        lambda: Head.of(make_pipeline(StandardScaler(), LinearSVC()).fit(np.ones_like(FEATURES), TWO)),
        "all training features are alike", {
        "check that the images differ": "is about the user's images",
        "the layer of the features": partial(maps_of, make_pipeline(StandardScaler(), LinearSVC()), TWO)}),
    Row("head/vote.py: outputs: name one of net.head.classes_",
        lambda: net_of(MultiOutputClassifier(SVC()), COLUMNS)(PICTURES[:3]).head.voting.predicted(torch.ones(1, 3)),
        "the head has 3 outputs", {
        "as in SVMTarget(0)": partial(maps_of, MultiOutputClassifier(SVC()), COLUMNS, SVMTarget(0))}),
    Row("head/storage.py: is a pickle, as joblib writes it", lambda: Head.load(pickled()),
        "is a pickle, as joblib writes it", {
        "pass it to PCASVMNet(backbone, fitted)": partial(from_pickle, saved=False),
        "Head.of(fitted).save('head.safetensors')": partial(from_pickle, saved=True)}),
    Row("head/enumerated.py: runs outside of PyTorch",
        partial(program_of, make_pipeline(PCA(2), ensemble.RandomForestClassifier(3, random_state=0))),
        "RandomForestClassifier runs outside of PyTorch", {"make one without it": partial(program_of, PCA(2))}),
    Row("head/predictor.py: has no classes_", lambda: Head.of([PCA(2).fit(FEATURES), Labelling(classes=None)]),
        "Labelling predicts labels, but has no classes_", {"give it the attribute classes_": maps_of_labelling}),
    Row("head/predictor.py: gives other values for the same rows",
        lambda: Head.of([PCA(2).fit(FEATURES), Wavering(np.arange(3))]),
        "Wavering gives other values for the same rows", {"fix its random_state": maps_of_labelling}),
    Row("head/predictor.py: predicts classes that are not in its classes_",
        lambda: Head.of([PCA(2).fit(FEATURES), Labelling(np.array(["a", "b", "c"]))]),
        "Labelling predicts classes that are not in its classes_", {
        "let predict return members of classes_": maps_of_labelling}),
    Row("head/predictor.py: has no classes_, and predicts another class",
        lambda: Head.of([PCA(2).fit(FEATURES), Unnamed()]),
        "Unnamed has no classes_, and predicts another class than the one of its largest value", {
        "give it the attribute classes_": maps_of_labelling}),
    Row("head/predictor.py: gives one number for a row", lambda: Head.of([PCA(2).fit(FEATURES), Probabilities(1)]),
        "predict_proba of Probabilities gives one number for a row", {
        "let it return a column for each class": lambda: maps_of([PCA(2).fit(FEATURES), Probabilities(2)],
            method=ContributionCAM)}),
    Row("targets/decisions.py: hard votes do not tell which class came second",
        partial(maps_of_labelling, SVMTarget(versus="runner-up")), "hard votes do not tell which class came second", {
        "name it": partial(maps_of_labelling, SVMTarget(0, versus=1)),
        "or use 'others'": partial(maps_of_labelling, SVMTarget(versus="others"))}),
    Row("head/predictor.py: predicts several labels at a time", lambda: Head.of(several_labels(OneVsRestClassifier)),
        "OneVsRestClassifier predicts several labels at a time", {
        "fit one for each label, MultiOutputClassifier": lambda: maps_of(several_labels(MultiOutputClassifier),
            y=COLUMNS, method=ContributionCAM)}),
    Row("head/storage.py: which are not read from files", lambda: loaded_again(Labelling(np.arange(3))),
        "Labelling, which are not read from files", {
        "if you trust them and the file, load it with trusted": lambda: maps_of(loaded_again(Labelling(np.arange(3)),
                trusted=[f"{__name__}.Labelling"]), method=ContributionCAM)}),
    Row("targets/questions.py: jacobians needs a network",
        lambda: ClosedFormGradCAM(nn.Sequential(*BACKBONE[:2]).eval(), ["0"]).jacobians(PICTURES[:3]),
        "jacobians needs a network that returns scores (N, C), or a PCASVMNet", {
        "use explain": lambda: ClosedFormGradCAM(nn.Sequential(*BACKBONE[:2]).eval(), ["0"]).explain(PICTURES[:3],
            [lambda output: output.sum()])}),
    Row("targets/decisions.py: needs a head with an SVM", partial(maps_of, HALF, targets=SVMTarget(0)),
        "needs a head with an SVM, but this one has none", {
        "use PCATarget": partial(maps_of, HALF, targets=PCATarget(0))}),
]
# fmt: on
